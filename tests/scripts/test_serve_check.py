import json
import shutil
from pathlib import Path

import pytest
import torch

SERVE = Path(__file__).parents[2] / "scripts" / "serve"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVE))
    import check

    return check


TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture
def figures(check):
    """Our figures of a checkpoint and those of its source, 0.2 away from each other."""
    logits = torch.linspace(-1, 1, 5 * 8).view(5, 8).sin()
    nll = torch.nn.functional.cross_entropy(logits[:4].double(), torch.tensor(TOKENS[1:]))
    ours = check.Measured(logits, float(nll.exp()))
    return ours, check.Measured(logits + 0.2 * logits.abs().max(), 0.0)


def test_equal_logits_pass_whether_or_not_the_last_row_is_there(check, figures):
    ours, source = figures
    case = check.Case("vllm", "modelopt", "llama")
    for rows in (4, 5):
        found = check.compare(case, ours.logits[:rows].clone(), ours, source, TOKENS)
        assert found.fault is None
        assert found.difference == 0
        assert found.quantization == pytest.approx(0.2, rel=0.1)
        assert found.perplexity == ours.perplexity


@pytest.mark.parametrize(
    ("decoded", "error", "passes"),
    [
        ("float32", 0.9e-4, True),
        ("float32", 1.1e-4, False),
        ("bfloat16", 3.8e-3, True),
        ("bfloat16", 4.0e-3, False),
        ("float32", float("nan"), False),
    ],
)
def test_one_wrong_logit_is_judged_by_the_tolerance(check, figures, decoded, error, passes):
    ours, source = figures
    theirs = ours.logits.clone()
    # A logit the perplexity barely depends on.
    theirs[2, 7] += error * ours.logits[:4].abs().max()
    case = check.Case("vllm", "modelopt", "llama", decoded=decoded)
    found = check.compare(case, theirs, ours, source, TOKENS)
    assert (found.fault is None) is passes


def test_another_perplexity_is_a_fault(check, figures):
    ours, source = figures
    wrong = check.Measured(ours.logits, ours.perplexity * 1.001)
    case = check.Case("vllm", "modelopt", "llama")
    found = check.compare(case, ours.logits, wrong, source, TOKENS)
    assert found.fault == "perplexities differ"


def test_a_source_too_close_to_judge_by_is_a_fault(check, figures):
    ours, _ = figures
    case = check.Case("vllm", "modelopt", "llama")
    found = check.compare(case, ours.logits, ours, ours, TOKENS)
    assert "too little to judge by" in found.fault


def test_requests_are_answered_one_by_one(check, tmp_path):
    requested = check.requested

    def logits(request):
        if request.checkpoint == "broken":
            raise ValueError("no such layout")
        return torch.full((2, 3), float(request.tokens[0]))

    outs = {name: tmp_path / name for name in ("broken", "good", "unasked")}
    asked = [requested.Request(n, "float32", [7], str(outs[n])) for n in ("broken", "good")]
    requested.ask(tmp_path / "requests.json", asked)
    requested.answer(tmp_path / "requests.json", logits)
    assert torch.equal(requested.read(outs["good"]), torch.full((2, 3), 7.0))
    with pytest.raises(RuntimeError, match="ValueError: no such layout"):
        requested.read(outs["broken"])
    with pytest.raises(RuntimeError, match="ended without an answer"):
        requested.read(outs["unasked"])


@pytest.mark.parametrize(
    ("fault", "code", "last"),
    [(None, 0, "3 passed, 0 failed"), ("out of order", 1, "2 passed, 1 failed")],
)
def test_last_line_and_exit_code(check, tmp_path, monkeypatch, capsys, fault, code, last):
    def run(engine, python, workshop):
        case = check.Case(engine, "torchao", "llama")
        return [check.Finding(case, fault if engine == "vllm" else None)]

    monkeypatch.setattr(check, "run", run)
    file = tmp_path / "findings.json"
    arguments = ["--vllm", "python", "--smollm2", "folder", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["check.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        check.main()
    assert int(exit_.value.code) == code
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert [f["fault"] for f in json.loads(file.read_text())] == [None, None, fault]


def test_a_checkpoint_that_cannot_be_written_fails_its_case_alone(check, tmp_path, monkeypatch):
    cases = (check.Case("vllm", "torchao", "llama"), check.Case("vllm", "modelopt", "llama"))
    monkeypatch.setattr(check, "CASES", cases)

    class Workshop(check.Workshop):
        def checkpoint(self, case):
            if case.layout == "torchao":
                raise RuntimeError("nvfp4 quantize failed: no space")
            return tmp_path

        def tokens(self, model):
            return TOKENS

    found = check.run("vllm", Path(shutil.which("true")), Workshop(tmp_path, tmp_path))
    assert [f.fault for f in found] == [
        "RuntimeError: nvfp4 quantize failed: no space",
        "the engine ended without an answer",
    ]
