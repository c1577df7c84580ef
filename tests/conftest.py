"""Tiny random checkpoints for every test; the same options give the same folder in a session."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

torch.set_num_threads(1)  # pytest-xdist runs one process per core


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(model_type, **options) -> folder`, not to be written to.

    Options are the fields of `make_tiny_model.Shape` and `dtype` (a torch dtype), `seed` and
    `shards`.
    """
    import make_tiny_model as tiny

    made: dict[tuple, Path] = {}

    def make(
        model_type: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        shards: int = 1,
        **shape,
    ) -> Path:
        sizes = tiny.Shape(**shape) if shape or model_type in tiny.SHAPED else None
        key = (model_type, sizes, dtype, seed, shards)
        if key not in made:
            config = tiny.make_config(model_type, sizes)
            folder = tmp_path_factory.mktemp(model_type)
            tiny.save(tiny.make_model(config, dtype=dtype, seed=seed), folder, shards=shards)
            made[key] = folder
        return made[key]

    return make
