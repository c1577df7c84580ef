"""Load what `nvfp4 quantize` writes in real engines, on a CPU, and compare their logits with ours.

Each case writes a checkpoint with the command line, has an engine compute the logits of a short
text from it, and computes them a second time from the weights that `nvfp4cli.layouts` reads back,
in plain transformers. scripts/serve_check.sh makes the environments and calls this, with scripts/
on the module path.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import make_tiny_model as tiny
import requested
import sources
import torch
import transformers
from torch import Tensor

from nvfp4cli.evaluate.perplexity import evaluate
from nvfp4cli.runtime.model import load, load_tokenizer
from nvfp4cli.runtime.served import as_served

HERE = Path(__file__).parent
TOKENS = 192
# Largest difference of a logit, in units of the largest logit, by what the engine decodes to. The
# rounding of fp32 sums costs 2e-6 after 30 layers. compressed-tensors rounds twice on its way to
# bf16, which moves 1 weight in 2000 by one bf16 step and the logits by 6e-4. Where 21 divides the
# significand of the largest weight, as it does 147 in layer 1's attention of the tiny mixtral and
# deepseek_v3, the global scale is amax / 2688 = 7 * 2^-k: 1 weight in 12 lies halfway between two
# bf16 values, 1 in 30 goes the other way than ours, and the logits move by 1.0e-3 and 1.8e-3. All
# other weights are equal there, every token goes to the same experts, and with the engine's weights
# in our model the logits are equal to the bit. One matrix of one layer 1 % too large moves them by
# 1.5e-3 or more, swapped nibbles in it by 0.2 or more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0**-8}
SMOLLM2 = "SmolLM2-135M"


@dataclass(frozen=True)
class Case:
    """One checkpoint in one engine.

    stored: dtype of what stays unquantised, the source's or fp32. torchao computes in the dtype it
    is told there, so fp32 lets both sides be compared in fp32. decoded: dtype in which the engine
    holds the decoded weights; compressed-tensors outside vLLM knows bf16 and fp16 only. answer: a
    part of the fault that the engine is known to have. The case fails once it has it no longer.
    scheme: w4a16, or w4a4, whose inputs of layers both sides round.
    """

    engine: str
    layout: str
    model: str
    rotate: str = "none"
    stored: str = "source"
    decoded: str = "float32"
    answer: str | None = None
    scheme: str = "w4a16"


CASES = (
    Case("transformers", "torchao", "llama", stored="float32"),
    Case("transformers", "torchao", "qwen3", stored="float32"),
    Case("transformers", "torchao", "phi3", stored="float32"),
    Case("transformers", "torchao", "gemma", stored="float32"),
    Case("transformers", "torchao", SMOLLM2, stored="float32"),
    # Where an activation lies within fp32's noise of two codes, both are right and the logits part
    # by more than the tolerance, as those of the tiny llama and phi3 do; here none does.
    Case("transformers", "torchao", "qwen3", stored="float32", scheme="w4a4"),
    Case("transformers", "torchao", "gemma", stored="float32", scheme="w4a4"),
    Case("transformers", "compressed-tensors", "qwen2", rotate="r1r2", decoded="bfloat16"),
    Case("transformers", "compressed-tensors", SMOLLM2, decoded="bfloat16"),
    Case("transformers", "compressed-tensors", "qwen3", decoded="bfloat16"),
    Case("transformers", "compressed-tensors", "phi3", decoded="bfloat16"),
    Case("transformers", "compressed-tensors", "gemma", decoded="bfloat16"),
    Case("transformers", "compressed-tensors", "llama", decoded="bfloat16", scheme="w4a4"),
    # It leaves out the experts' global scale, and says nothing: see in_transformers_fixed.py.
    Case(
        "transformers",
        "compressed-tensors",
        "qwen3_moe",
        decoded="bfloat16",
        answer="logits differ",
    ),
    # It holds the experts of a layer in one tensor, and of this type joins none that are apart.
    Case(
        "transformers",
        "compressed-tensors",
        "gpt_oss",
        decoded="bfloat16",
        answer="missing_keys",
    ),
    Case("transformers_fixed", "compressed-tensors", "qwen3_moe", decoded="bfloat16"),
    Case("transformers_fixed", "compressed-tensors", "mixtral", decoded="bfloat16"),
    Case("transformers_fixed", "compressed-tensors", "deepseek_v3", decoded="bfloat16"),
    Case("comfy", "comfy", "qwen2", rotate="r1r2"),
    Case("comfy", "comfy", SMOLLM2),
    Case("vllm", "torchao", "llama", stored="float32"),
    Case("vllm", "torchao", "llama", rotate="r1r2", stored="float32"),
    Case("vllm", "compressed-tensors", "qwen2", rotate="r1r2"),
    Case("vllm", "compressed-tensors", SMOLLM2),
    Case("vllm", "modelopt", "qwen3"),
    Case("vllm", "modelopt", SMOLLM2),
    Case("vllm", "modelopt", SMOLLM2, rotate="r1r2"),
    Case("vllm", "compressed-tensors", "phi3"),
    Case("vllm", "compressed-tensors", "llama", scheme="w4a4"),
    Case("vllm", "modelopt", "llama", scheme="w4a4"),
    Case("vllm", "modelopt", "gemma"),
    Case("vllm", "compressed-tensors", "qwen3_moe"),
    Case("vllm", "modelopt", "mixtral", rotate="r1r2"),
    Case("vllm", "modelopt", "deepseek_v3"),
    Case("vllm", "modelopt", "granitemoe"),
    # Its NVFP4 experts have no biases, in either layout and whatever the names.
    Case("vllm", "compressed-tensors", "gpt_oss", answer="KeyError: 'layers.0.mlp.experts.0."),
)


@dataclass(frozen=True)
class Finding:
    """Outcome of one case. The figures are None where the engine gave no logits.

    fault: why the case fails. known: the fault that it is known to have.
    difference: largest difference of a logit in units of the largest logit of ours.
    quantization: the same between our logits and those of the unquantised source, which says how
    much of a fault the tolerance could hide.
    """

    case: Case
    fault: str | None
    difference: float | None = None
    quantization: float | None = None
    perplexity: float | None = None
    our_perplexity: float | None = None
    known: str | None = None


@dataclass(frozen=True)
class Measured:
    """Our own figures. logits: fp32 [T, V]. perplexity: as `nvfp4 eval` reports it."""

    logits: Tensor
    perplexity: float


def compare(
    case: Case, theirs: Tensor, ours: Measured, source: Measured, tokens: list[int]
) -> Finding:
    """Judge an engine's logits, fp32 [T - 1 or T, V], against those of the same checkpoint and of
    its unquantised source."""
    rows = len(tokens) - 1  # the last token has no successor here
    tolerance = TOLERANCE[case.decoded]
    difference = _distance(theirs[:rows], ours.logits[:rows])
    quantization = _distance(source.logits[:rows], ours.logits[:rows])
    nll = torch.nn.functional.cross_entropy(theirs[:rows].double(), torch.tensor(tokens[1:]))
    perplexity = float(nll.exp())
    fault = None
    if not difference <= tolerance:  # NaN too
        fault = f"logits differ by {difference:.1e}, allowed are {tolerance:.1e}"
    elif not abs(perplexity / ours.perplexity - 1) <= tolerance:
        fault = "perplexities differ"
    elif not quantization > 10 * tolerance:
        fault = f"quantising moved the logits by {quantization:.1e}: too little to judge by"
    return Finding(case, fault, difference, quantization, perplexity, ours.perplexity)


def excuse(found: Finding) -> Finding:
    """A finding whose fault is none where the engine is known to have it, and only there."""
    answer = found.case.answer
    if answer is None:
        return found
    if found.fault and answer in found.fault:
        return replace(found, fault=None, known=found.fault)
    return replace(found, fault=f"{found.fault or 'all is well'}: expected was {answer!r}")


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


class Workshop:
    """Sources, checkpoints and our own figures, each made once, in one folder."""

    def __init__(self, folder: Path, smollm2: Path) -> None:
        self.folder = folder
        self._smollm2 = smollm2
        self._measured: dict[tuple[Path, str], Measured] = {}

    def source(self, model: str) -> Path:
        """Folder of an unquantised model: SMOLLM2, or a model type for a tiny one."""
        if model == SMOLLM2:
            return self._smollm2
        folder = self.folder / model
        if not folder.exists():
            tiny.save(sources.make(model), folder)
        return folder

    def checkpoint(self, case: Case) -> Path:
        """Folder that `nvfp4 quantize` wrote for a case; RuntimeError with what it said instead."""
        out = self.folder / "-".join(
            (case.model, case.layout, case.scheme, case.rotate, case.stored)
        )
        if not out.exists():
            nvfp4 = Path(sys.executable).with_name("nvfp4")
            command = [nvfp4, "quantize", self.source(case.model), out, "--scheme", case.scheme]
            command += ["--layout", case.layout, "--rotate", case.rotate, "--dtype", case.stored]
            if case.scheme == "w4a4":
                command += ["--text", self._text(), "--sequences", "4"]
                command += ["--sequence-length", "128"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"nvfp4 quantize failed: {done.stderr.strip()[-1000:]}")
        return out

    def _text(self) -> Path:
        """File of the text that input scales are calibrated on."""
        file = self.folder / "text.txt"
        file.write_text(tiny.CORPUS)
        return file

    def tokens(self, model: str) -> list[int]:
        """The text, as the model's tokenizer has it."""
        tokenizer = load_tokenizer(self.source(model))
        return tokenizer(tiny.CORPUS, add_special_tokens=False).input_ids[:TOKENS]

    def measure(self, folder: Path, decoded: str, tokens: list[int]) -> Measured:
        """Our figures for a checkpoint: weights rounded to `decoded`, all else in fp32, inputs of
        layers rounded where it declares that."""
        if (folder, decoded) not in self._measured:
            wide = load(folder, dtype=getattr(torch, decoded), device="cpu").float()
            model = as_served(wide, folder, "declared")
            ids, size = torch.tensor(tokens), len(tokens)
            with torch.inference_mode():
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
            scores = evaluate(model, ids, context=size, stride=size, batch_size=1, bos=None)
            self._measured[folder, decoded] = Measured(logits, scores.perplexity)
        return self._measured[folder, decoded]


def run(engine: str, python: Path, workshop: Workshop) -> list[Finding]:
    """All cases of one engine, in one process of its own: it starts slowly."""
    outs = {case: workshop.folder / f"{engine}-{i}" for i, case in enumerate(CASES)}
    outs = {case: out for case, out in outs.items() if case.engine == engine}
    say(f"{engine}: {len(outs)} checkpoints")
    requests = []
    for case, out in outs.items():
        try:
            folder = workshop.checkpoint(case)
        except RuntimeError as error:
            requested.refuse(out, error)
            continue
        tokens = workshop.tokens(case.model)
        requests.append(requested.Request(str(folder), case.decoded, tokens, str(out)))
    file, log = workshop.folder / f"{engine}.json", workshop.folder / f"{engine}.log"
    requested.ask(file, requests)
    with log.open("w") as stream:
        subprocess.run(
            [python, HERE / f"in_{engine}.py", file], stdout=stream, stderr=stream, check=False
        )
    findings = [excuse(judge(case, out, workshop)) for case, out in outs.items()]
    if any(finding.fault for finding in findings):
        say(f"the end of what {engine} said:\n{log.read_text()[-6000:]}")
    return findings


def judge(case: Case, out: Path, workshop: Workshop) -> Finding:
    """Compare the answer at `out` with our own figures."""
    try:
        theirs = requested.read(out)
    except RuntimeError as error:
        return Finding(case, fault=str(error))
    tokens = workshop.tokens(case.model)
    ours = workshop.measure(workshop.checkpoint(case), case.decoded, tokens)
    source = workshop.measure(workshop.source(case.model), "float32", tokens)
    return compare(case, theirs, ours, source, tokens)


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


COLUMNS = "{:<18} {:<19} {:<8} {:<13} {:<7} {:>11} {:>12} {:>11} {:>11}  {}"

WIDTH = 100  # of what is shown of an engine's known answer


def table(findings: list[Finding]) -> str:
    """One line a finding, under a heading."""
    heads = ("engine", "layout", "scheme", "model", "rotate", "difference", "(quantising)")
    lines = [COLUMNS.format(*heads, "perplexity", "ours", "verdict")]
    for found in findings:
        case = found.case
        figures = [
            "-" if value is None else form.format(value)
            for form, value in (
                ("{:.1e}", found.difference),
                ("{:.1e}", found.quantization),
                ("{:.4f}", found.perplexity),
                ("{:.4f}", found.our_perplexity),
            )
        ]
        names = (case.engine, case.layout, case.scheme, case.model, case.rotate)
        verdict = f"FAIL: {found.fault}" if found.fault else "ok"
        if found.known:
            verdict = f"as known: {found.known[:WIDTH]}"
        lines.append(COLUMNS.format(*names, *figures, verdict))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, required=True, help="python of vLLM's environment")
    parser.add_argument("--smollm2", type=Path, required=True, help="folder of get_smollm2.py")
    parser.add_argument("--json", type=Path, help="file to write the findings to")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    ours = Path(sys.executable)
    pythons = dict.fromkeys(("transformers", "transformers_fixed", "comfy"), ours)
    pythons |= {"vllm": options.vllm}
    with tempfile.TemporaryDirectory(prefix="serve-check-") as folder:
        workshop = Workshop(Path(folder), options.smollm2)
        findings = [
            finding
            for engine, python in pythons.items()
            for finding in run(engine, python, workshop)
        ]
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in findings], indent=2) + "\n")
    failed = sum(finding.fault is not None for finding in findings)
    print(table(findings))
    print(f"{len(findings) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
