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


KNOWN = "KeyError: 'w2_bias'"


@pytest.mark.parametrize(
    ("answer", "fault", "left", "known"),
    [
        (None, None, None, None),
        (None, KNOWN, KNOWN, None),
        ("KeyError", KNOWN, None, KNOWN),
        ("KeyError", None, "all is well: expected was 'KeyError'", None),
        ("KeyError", "logits differ", "logits differ: expected was 'KeyError'", None),
    ],
)
def test_a_fault_passes_only_where_it_is_known(check, answer, fault, left, known):
    case = check.Case("vllm", "modelopt", "gpt_oss", answer=answer)
    found = check.excuse(check.Finding(case, fault))
    assert (found.fault, found.known) == (left, known)
    assert check.table([found]).endswith(
        f"FAIL: {left}" if left else f"as known: {known}" if known else "ok"
    )


def test_tiny_sources_fit_the_engines(check):
    models = {case.model for case in check.CASES} - {check.SMOLLM2}
    swizzled = {case.model for case in check.CASES if case.layout == "torchao"} - {check.SMOLLM2}
    for name in sorted(models):
        model = check.sources.make(name)
        assert model.config.model_type == name
        rows = {len(m.weight) for n, m in model.named_modules() if n.endswith("_proj")}
        assert name not in swizzled or all(count % 128 == 0 for count in rows)


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
    [(None, 0, "4 passed, 0 failed"), ("out of order", 1, "3 passed, 1 failed")],
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
    assert [f["fault"] for f in json.loads(file.read_text())] == [None, None, None, fault]


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
