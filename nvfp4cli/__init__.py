"""Quantise Hugging Face checkpoints to NVFP4 and write what serving engines load."""

__version__ = "0.1.0"
