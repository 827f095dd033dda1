"""``deepinfer verify speculation``: equal where it is, red where a drafter breaks the rule."""

import json

import pytest
from click.testing import CliRunner
from deepinfer.cli.verify import verify as command
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.sampling.verify import EqualityVerifier
from deepinfer.testing.speculation import MODES, Watched, verify
from deepinfer.testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_command(tiny):
    options = ["--model", tiny, "--speculative", "ngram,profile_seconds=1", "--tokens", "24"]
    run = CliRunner()
    shown = run.invoke(command, ["speculation", *options, "--threads", "1"], standalone_mode=False)
    assert shown.exception is None and shown.return_value == 0, shown
    assert all(f"{mode}: equal" in shown.output for mode in MODES)
    assert "accepted length" in shown.output and "calibration error" in shown.output
    told = run.invoke(
        command, ["speculation", *options, "--threads", "1", "--json"], standalone_mode=False
    )
    lines = json.loads(told.output)
    assert [line["mode"] for line in lines] == list(MODES)
    assert all(line["ok"] and line["drafted"] >= line["accepted"] for line in lines)
    assert lines[0]["verified"] > 0, "nothing was drafted: the check would be empty"


def test_a_broken_rule_is_found(tiny, monkeypatch):
    """A verifier that accepts whatever was drafted."""
    whole = EqualityVerifier.verify

    def gullible(self, logits, rows, drafts, lengths):
        tokens, counts = whole(self, logits, rows, drafts, lengths)
        if drafts.shape[1]:
            tokens[:, :-1] = drafts
            counts = 1 + lengths
        return tokens, counts

    monkeypatch.setattr(EqualityVerifier, "verify", gullible)
    config = EngineConfig(model=tiny, speculative="ngram,mode=static", num_threads=1)
    (report,) = verify(config, tokens=24, modes=("static",))
    assert not report.ok and "DIFFERS in request" in report.lines()[0]


@pytest.mark.parametrize(
    "given, said", [(None, "no speculation"), ("ngram,acceptance=ratio", "a distribution")]
)
def test_what_cannot_be_verified_is_refused(tiny, given, said):
    with pytest.raises(ConfigError, match=said):
        verify(EngineConfig(model=tiny, speculative=given))


def test_calibration_by_hand():
    import numpy as np

    zeros = np.zeros(2, np.int64)
    assert Watched(zeros, zeros).calibration() is None
    seen = Watched(zeros, zeros, said=[(0.9, True), (0.9, True), (0.1, False), (0.1, True)])
    # bins of 0.9: |0.9 − 1| · 1/2, of 0.1: |0.1 − 0.5| · 1/2
    assert seen.calibration() == pytest.approx(0.05 + 0.2)


@pytest.mark.model
@pytest.mark.slow
def test_prompt_lookup_on_the_demo_model():
    config = EngineConfig(model="demo", batch_invariant=True, speculative="ngram,mode=static")
    reports = verify(config, tokens=32, modes=("static", "adaptive"))
    assert all(report.ok for report in reports)
    assert reports[0].accepted > 0
