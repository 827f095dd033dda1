"""``deepinfer speculative calibrate``: what it collects, fits and writes, and who reads it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from deepinfer import LLM, SamplingParams
from deepinfer.api.calibration import CalibrationContext, DraftRounds
from deepinfer.cli.speculative import read_prompts, speculative
from deepinfer.config import EngineConfig, SpeculativeConfig
from deepinfer.errors import ConfigError, ModelLoadError
from deepinfer.testing.calibration import Workload
from deepinfer.testing.calibration import calibrate as run
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.calibrate import calibrate, log_odds
from deepinfer_speculative.dspark.calibrated import Temperatures, read_table
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from draft_rig import Watched, prompts
from dspark_rig import pair as dspark_pair

CARRIED = Path(__file__).parents[1] / "data" / "deepseek-v41" / "a"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def learnt(learn, tmp_path_factory):
    """A head of our own: these tests write beside its weights."""
    target, head, _ = learn("eagle3")
    return target, shutil.copytree(head, tmp_path_factory.mktemp("learnt") / "head")


@pytest.fixture
def asked(learnt):
    target, head = learnt
    (head / "calibration.json").unlink(missing_ok=True)
    return ["calibrate", "--model", str(target), "--speculative", str(head), "--threads", "1"]


@pytest.fixture
def lines(tmp_path):
    """Texts that the tiny tokenizer splits into many tokens."""
    file = tmp_path / "prompts.jsonl"
    texts = [
        f"{word} and {word} again, {i}" for i, word in enumerate("abc de fgh ij k lmn".split())
    ]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(file)


def shell(*argv):
    done = CliRunner().invoke(speculative, argv, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    assert done.return_value == 0
    return done.output


def test_the_command_writes_beside_the_weights_and_the_drafter_reads_it(
    asked, lines, learnt, monkeypatch
):
    target, head = learnt
    shown = shell(*asked, "--prompts", lines, "--tokens", "60")
    assert "greedy (T = 0)" in shown and "sampled (T = 1)" in shown
    assert shown.count("calibration error before") == shown.count("error after") == 2
    said = json.loads((head / "calibration.json").read_text())
    assert said.keys() == {"exact"} and said["exact"].keys() == {"greedy", "sampled"}
    assert all(len(said["exact"][way]) == 3 for way in ("greedy", "sampled"))
    (head / "calibration.json").write_text(json.dumps({"exact": {"greedy": [2, 4], "sampled": []}}))
    raw, scaled = (confidences(target, head, monkeypatch, **more) for more in (
        {"calibration": "off"}, {},
    ))  # fmt: skip
    z = torch.logit(raw.double())
    expected = torch.sigmoid(z / torch.tensor([2.0, 4.0, 1.0]))
    assert torch.allclose(scaled.double(), expected, atol=1e-4)
    assert not torch.allclose(scaled, raw, atol=1e-2)


def confidences(target, head, monkeypatch, **options):
    watched = Watched(monkeypatch, Eagle3Drafter)
    given = {"model": str(head), "mode": "static", **options}
    with LLM(str(target), max_model_len=64, num_threads=1, speculative=given) as llm:
        llm.generate(prompts(3), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    monkeypatch.undo()
    return torch.stack([sure for _, _, sure in watched.rounds])


def test_a_file_elsewhere_keeps_what_it_says_of_the_other_rule(asked, lines, learnt, tmp_path):
    target, head = learnt
    out = tmp_path / "mine.json"
    out.write_text(json.dumps({"exact": {"greedy": [3.0]}, "ratio": {"greedy": [9.0]}}))
    where = f"model={head},acceptance=ratio,mode=cap"  # it runs static whatever the mode
    asked[asked.index("--speculative") + 1] = where
    told = json.loads(
        shell(*asked, "--prompts", lines, "--tokens", "60", "--out", str(out), "--json")
    )
    assert told["path"] == str(out) and not (head / "calibration.json").exists()
    said = json.loads(out.read_text())
    assert said["exact"] == {"greedy": [3.0]}
    assert said["ratio"]["greedy"] == [round(t, 4) for t in told["temperatures"]["greedy"]]
    assert len(told["before"]["sampled"]) == len(told["after"]["sampled"]) == 3
    given = {"model": str(head), "calibration": str(out), "mode": "static"}
    LLM(str(target), max_model_len=64, num_threads=1, speculative=given).close()


def test_rounds_are_those_of_the_engine(learnt, monkeypatch):
    """Confidence of each round, and what stood of it, against the drafter watched from within."""
    target, head = learnt
    watched = Watched(monkeypatch, Eagle3Drafter)
    given = {}

    def keep(context):
        given.update(context.rounds)
        return SimpleNamespace()

    monkeypatch.setattr("deepinfer_speculative.calibrate.calibrate", keep)
    config = EngineConfig(model=str(target), speculative=str(head), num_threads=1)
    run(config, Workload(prompts=prompts(48)[:4], tokens=20, samples=2))
    assert len(given["sampled"].accepted) > len(given["greedy"].accepted) > 20
    texts = [text for text, _, _ in watched.rounds]
    truth = {}  # of rounds whose text goes on: confidences -> drafts that the text has behind it
    for text, drafts, sure in watched.rounds:
        longer = [t for t in texts if len(t) > len(text) + 3 and t[: len(text)] == text]
        if longer:
            same = [a == b for a, b in zip(drafts, longer[0][len(text) :], strict=False)]
            truth[tuple(np.float64(sure.numpy()))] = int(np.cumprod(same).sum())
    greedy = given["greedy"]
    known = [(tuple(c), a) for c, a in zip(greedy.confidence, greedy.accepted, strict=True)]
    known = [(c, int(a)) for c, a in known if c in truth]
    assert len(known) > 20 and len({a for _, a in known}) > 1
    assert all(truth[c] == a for c, a in known)


def test_a_dspark_draft_can_be_calibrated(tmp_path):
    target, draft = dspark_pair(tmp_path, "llama")
    config = EngineConfig(model=str(target), speculative=str(draft), num_threads=1)
    found = run(config, Workload(prompts=prompts(6), tokens=40))
    assert found.path == draft / "calibration.json"
    assert {len(t) for t in found.temperatures.values()} == {5}


def test_the_carried_draft_needs_a_file_to_write(tmp_path):
    """And a hub's too; both are told before anything runs."""
    carried = {"model": str(CARRIED), "num_threads": 1, "max_model_len": 128, "max_num_seqs": 4}
    asked = EngineConfig(**carried, speculative="mtp")
    work = Workload(prompts=[[5, 6, 7, i] for i in range(4)], tokens=24)
    for config, said in (
        (asked, "the target's checkpoint"),
        (asked.model_copy(update={"speculative": SpeculativeConfig(method="mtp", model="a/b")}),
         "a/b"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said) as raised:
            run(config, work)
        assert "--out" in raised.value.next_step
    found = run(asked, work, tmp_path / "mtp.json")
    given = {"method": "mtp", "mode": "static", "calibration": str(found.path)}
    with LLM(**carried, speculative=given) as llm:
        assert llm.assembly.facts.draft_len == len(found.temperatures["greedy"])


def test_there_must_be_a_place_to_write_before_anything_runs(tmp_path):
    target = str(write_tiny_checkpoint(tmp_path / "t"))
    shipped = EngineConfig(model=target, speculative="dspark-demo")
    with pytest.raises(ConfigError, match="the package of 'dspark-demo'") as raised:
        run(shipped, Workload())
    assert "--out" in raised.value.next_step
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        run(shipped, Workload(), tmp_path / "nowhere" / "c.json")


def test_what_has_no_confidences_is_refused(tmp_path):
    target = str(write_tiny_checkpoint(tmp_path / "t"))
    with pytest.raises(ConfigError, match="'ngram' has no confidences"):
        run(EngineConfig(model=target, speculative="ngram"), Workload())
    with pytest.raises(ConfigError, match="no speculation"):
        run(EngineConfig(model=target), Workload())


# The plugin's half.


def rounds(n=3000, heat=0.5, seed=1):
    """Over-confident: what is said is σ(z/heat), what is so is σ(z)."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0.5, 1.0, (n, 4))
    stood = rng.random((n, 4)) < 1 / (1 + np.exp(-z))
    said = 1 / (1 + np.exp(-z / heat))
    return DraftRounds(confidence=said, accepted=stood.cumprod(1).sum(1))


def context(tmp_path, n=3000, **more):
    both = {"greedy": rounds(n), "sampled": rounds(n, heat=2.0, seed=2)}
    facts = {"method": "m", "model": str(tmp_path), "acceptance": "exact", "rounds": both}
    return CalibrationContext(**{**facts, "out": None, **more})


def test_it_finds_how_over_confident_a_draft_is(tmp_path):
    found = calibrate(context(tmp_path, 20_000))
    assert found.temperatures["greedy"][0] == pytest.approx(2.0, rel=0.15)
    assert found.temperatures["sampled"][0] == pytest.approx(0.5, rel=0.15)
    for way in ("greedy", "sampled"):
        assert max(found.after[way]) < 0.04 < max(found.before[way])
    table = read_table(tmp_path / "calibration.json", "exact", 3)
    assert table[0].tolist() == pytest.approx(found.temperatures["greedy"][:3], abs=1e-3)
    assert table[1].tolist() == pytest.approx(found.temperatures["sampled"][:3], abs=1e-3)


def test_too_few_rounds_and_files_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="39 greedy rounds"):
        calibrate(context(tmp_path, 39))
    assert not (tmp_path / "calibration.json").exists()
    file = tmp_path / "c.json"
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="no JSON object"):
        calibrate(context(tmp_path, 100, out=file))
    with pytest.raises(ConfigError, match="cannot be written"):
        calibrate(context(tmp_path, 100, out=tmp_path / "no" / "c.json"))


def test_certainty_stays_finite():
    assert np.isfinite(log_odds(np.array([0.0, 0.5, 1.0, np.nan]))).all()


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "no calibration"),
        ("[]", "no calibration"),
        ('{"exact": []}', "no calibration"),
        ('{"exact": {"greedy": 2}}', "no calibration"),
        ('{"exact": {"greedy": ["x"]}}', "no calibration"),
        ('{"exact": {"greedy": [1, 0]}}', r"exact.greedy is \[1, 0\], .* from 1e-06 to"),
        ('{"exact": {"sampled": [NaN]}}', r"exact.sampled is \[nan\], .* from 1e-06 to"),
        ('{"exact": {"greedy": [1e300]}}', "from 1e-06 to 1e\\+06"),
        ('{"exact": {"greedy": [true]}}', "no calibration"),
        ('{"exact": {"greedy": [[2]]}}', "no calibration"),
        ('{"exact": {"greedey": [2]}}', "an object of greedy and sampled"),
        ('{"exakt": {"greedy": [2]}}', "an object of exact and ratio"),
        ("null", "deepinfer speculative calibrate"),
        (None, "no calibration"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, said):
    file = tmp_path / "c.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ModelLoadError, match=said):
        read_table(file, "exact", 4)


def test_where_temperatures_come_from(tmp_path):
    def table(folder=None, **options):
        asked = SimpleNamespace(options=options, acceptance="exact")
        return Temperatures.asked(asked, folder, 2, torch.device("cpu")).table.tolist()

    ones = [[1.0, 1.0], [1.0, 1.0]]
    assert table() == table(str(tmp_path)) == ones
    (tmp_path / "calibration.json").write_text('{"exact": {"sampled": [2, 3, 4]}}')
    (tmp_path / "other.json").write_text('{"exact": {"greedy": [5]}}')
    assert table(str(tmp_path)) == [[1.0, 1.0], [2.0, 3.0]]
    assert table(str(tmp_path), calibration="off") == ones
    other = str(tmp_path / "other.json")
    assert table(str(tmp_path), calibration=other) == table(calibration=other)
    assert table(calibration=other) == [[5.0, 1.0], [1.0, 1.0]]


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"prompt": "c"}\n{"turns": []}\n')
    assert read_prompts(file, 2) == [[{"role": "user", "content": "a"}], "c"]
    with pytest.raises(ConfigError, match="line 3"):
        read_prompts(file, None)
    file.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b"}\n\n')
    assert read_prompts(file, None) == ["a", "b"]
    for text in ("", "\n", "null\n", '"turns"\n', "7\n", '{"prompt": 3}\n', "\xff\n"):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"p\.jsonl"):
            read_prompts(file, None)
