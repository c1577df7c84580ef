#!/usr/bin/env python
"""Does folding preserve the function? Logits of a model before and after R1 and R2, in fp32.

    python scripts/check_fold.py MODEL [--rotate r1r2] [--rotation-kind hadamard] [--tokens 128]

Prints the largest logit difference relative to the largest logit, and the KL divergence, on
random tokens. Exact folds give about 1e-6, the rounding of fp32; a wrong one gives 0.1 or more.
Exit code 1 above 1e-5.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from nvfp4cli.cli.app import main as nvfp4
from nvfp4cli.runtime.model import load

LIMIT = 1e-5


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rotate", default="r1r2")
    parser.add_argument("--rotation-kind", default="hadamard")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folded = Path(scratch, "folded")
        how = ["--rotate", options.rotate, "--rotation-kind", options.rotation_kind]
        fold = ["quantize", str(options.model), str(folded), "--scheme", "none", *how]
        code = nvfp4([*fold, "--dtype", "float32"])
        if code:
            return code
        model = load(options.model, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (1, options.tokens), generator=generator)
        before = model(input_ids=tokens, use_cache=False).logits[0]
        del model
        after = load(folded, dtype=torch.float32, device="cpu")(tokens, use_cache=False).logits[0]
    error = ((after - before).abs().max() / before.abs().max()).item()
    before, after = before.double().log_softmax(-1), after.double().log_softmax(-1)
    divergence = (before.exp() * (before - after)).sum(-1).mean().item()
    print(f"{options.rotate} {options.rotation_kind}: max |d logit| / max |logit| = {error:.2e}, "
          f"KL = {divergence:.2e}")  # fmt: skip
    return int(error > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
