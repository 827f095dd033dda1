"""The example of prefill truncation: its table on the tiny model, and when it fails."""

import re

import numpy as np
import pytest
from deepinfer.testing.tiny import write_tiny_checkpoint

SMALL = ["--lengths", "20", "70", "--keep", "16", "64", "--tokens", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def yoco(example):
    return example("yoco/yoco_equiv.py")


def answer(yoco, *rows, tokens=(3, 4)):
    return yoco.Answer(8, tokens, np.array(rows, np.float32), 0.1)


def test_the_tiny_model(yoco, capsys):
    """Fewer rows than are exact change the last row, as many do not; the verdict is printed."""
    assert yoco.main(SMALL) == 0
    text = capsys.readouterr().out
    lines = re.findall(
        r"^(\w+(?: \(invariant\))?) +(\d+)? +(\d+) +(\d\.\d\de[+-]\d\d) +(\w+) +[\d.]+$", text, re.M
    )
    found = {(*line[:2], i // 8): (int(line[2]), float(line[3])) for i, line in enumerate(lines)}
    assert len(found) == len(lines) == 16
    assert found["compact", "16", 1] == found["mask", "16", 1] != (16, 0.0)
    assert found["compact", "16", 1][0] == 16
    assert found["compact", "64", 1] == (64, 0.0)  # as many as exact keeps, or more
    assert found["exact", "", 1] == found["exact (invariant)", "", 1] == (61, 0.0)
    assert found["exact", "", 0] == found["compact", "64", 0] == (20, 0.0)
    assert "bit for bit" in text


@pytest.mark.parametrize(
    "setting", [("mask", 16, False), ("compact", 16, False), ("exact", None, True)]
)
@pytest.mark.parametrize("change", ["token", "last bit", "sign of zero"])
def test_what_must_be_equal(yoco, setting, change):
    """A token or a bit of one row is enough; other settings may differ as they like."""
    wished = yoco.settings([16])
    found = {how: [answer(yoco, [-1.5, 0.0], [-2.0, -0.25])] for how in wished}
    found[yoco.Setting("exact")] = [answer(yoco, [-1.0, -9.0], [-1.0, -9.0])]
    assert yoco.faults(found, [20]) == []
    rows = found[yoco.Setting("off")][0].logprobs.copy()
    tokens = (3, 5) if change == "token" else (3, 4)
    if change == "last bit":
        rows[1, 0] = np.nextafter(rows[1, 0], np.float32(0))
    if change == "sign of zero":
        rows[0, 1] = -0.0
    found[yoco.Setting(*setting)] = [answer(yoco, *rows, tokens=tokens)]
    (sentence,) = yoco.faults(found, [20])
    assert "at 20 tokens" in sentence and setting[0] in sentence


def test_a_difference_fails(yoco, monkeypatch, capsys):
    """Exit status 1, and the pair is named."""

    def fake(model, how, args):
        shift = 0.5 if how.mode == "mask" else 0.0
        return [answer(yoco, [-1.0 - shift, -2.0])] * len(args.lengths)

    monkeypatch.setattr(yoco, "answers", fake)
    assert yoco.main(["--model", "any", "--lengths", "20", "--keep", "16"]) == 1
    assert "FAIL: compact and mask differ at 20 tokens, keep 16" in capsys.readouterr().out


def test_refusals_are_no_verdict(yoco, tmp_path, capsys):
    """Too few rows, and a model that truncates nothing: named, exit status 2."""
    assert yoco.main(["--lengths", "4", "--tokens", "1", "--threads", "1", "--keep", "3"]) == 2
    assert "yoco_prefill_keep_tokens=3" in capsys.readouterr().err
    llama = str(write_tiny_checkpoint(tmp_path, "llama"))
    assert yoco.main(["--model", llama, *SMALL]) == 2
    assert "yoco_prefill_truncation_mode" in capsys.readouterr().err
