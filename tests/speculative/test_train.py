"""Training: gradients, determinism, going on, and judging by what the engine does."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer_speculative.train import loop
from deepinfer_speculative.train.__main__ import main
from deepinfer_speculative.train.answers import (
    OWN,
    AnswerPlan,
    Texts,
    held_out,
    joined,
    read_prompts,
    write_answers,
    write_waves,
)
from deepinfer_speculative.train.data import Pool
from deepinfer_speculative.train.evaluate import _noise, fit, summary, walk
from deepinfer_speculative.train.loop import (
    TrainPlan,
    divergence,
    planned_steps,
    rate,
    timed_steps,
    train,
)
from deepinfer_speculative.train.losses import CE, L1, HeadLoss
from deepinfer_speculative.train.network import Network
from deepinfer_speculative.train.target import Target
from draft_rig import prompts
from dspark_rig import Plain, pair

TEMPLATE = "{% for m in messages %}a{{ m.content }}b{% endfor %}c"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_those_of_autograd(share):
    source = torch.Generator().manual_seed(0)
    n, hidden, rank, vocab = 37, 8, 4, 23

    def draw(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    h, e, w2 = (draw(*s).requires_grad_() for s in ((n, hidden), (n, rank), (vocab, rank)))
    head, truth = draw(vocab, hidden), draw(n, hidden)
    token = torch.randint(vocab, (n,), generator=source)
    weight = torch.rand(n, generator=source, dtype=torch.float64)
    logits = h @ head.T + e @ w2.T
    p, t = logits.softmax(1), (truth @ head.T).softmax(1)
    distance = (p - t).abs().sum(1)
    ce = torch.nn.functional.cross_entropy(logits, token, reduction="none")
    kl = torch.nn.functional.kl_div(p.log(), t, reduction="none").sum(1)
    expected = ((CE * ce + L1 * ((1 - share) * distance + share * kl)) * weight).sum()
    expected.backward()
    right = [x.grad.clone() for x in (h, e, w2)]
    for x in (h, e, w2):
        x.grad = None
    args = [x.detach().float().requires_grad_() for x in (h, e, w2)]
    found = HeadLoss.apply(*args, head.float(), truth.float(), token, weight.float(), share)
    found[0].backward()
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(found[3].double(), 1 - distance / 2, atol=1e-6)
    for mine, theirs in zip(args, right, strict=True):
        assert torch.allclose(mine.grad.double(), theirs, atol=1e-5)


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """A tiny target, its texts as a pool, and fresh networks for it."""
    folder = tmp_path_factory.mktemp("train")
    target, draft = pair(folder, "qwen3")
    found = Target(open_checkpoint(resolve(str(target))), torch.device("cpu"))
    rows = prompts(12, seed=2, length=30)
    texts = Texts(
        tokens=np.concatenate([np.array([5, 6, *row, 7], np.int32) for row in rows]),
        start=np.cumsum([0, *(len(row) + 3 for row in rows)]),
        prompt=np.full(12, 2, np.int32),
        hot=np.zeros(12, bool),
        held=np.zeros(12, bool),
        task=np.zeros(12, np.int32),
        tasks=("tiny",),
    )
    raw = json.loads((draft / "config.json").read_text())

    def network(seed=0):
        return Network(raw, found.embed, found.norm, seed)

    pool = Pool(texts, np.arange(12), found, (0, 1))
    return found, texts, pool, network


PLAN = TrainPlan(steps=6, batch=4, anchors=6, save=2)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(rig, tmp_path):
    target, _, pool, network = rig
    whole = network()
    history = train(whole, pool, target.head, PLAN, tmp_path / "whole.pt", lambda line: None)
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5, 6]

    def stop(line):
        if line.startswith("step=5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(network(), pool, target.head, PLAN, tmp_path / "part.pt", stop)
    rest = network(seed=9)  # what it begins with is overwritten
    train(rest, pool, target.head, PLAN, tmp_path / "part.pt", lambda line: None)
    for name, value in whole.tensors().items():
        assert torch.equal(value, rest.tensors()[name]), name
    other = TrainPlan(steps=7, batch=4, anchors=6, save=2)
    with pytest.raises(ConfigError, match="other settings"):
        train(network(), pool, target.head, other, tmp_path / "part.pt", lambda line: None)
    another = network()
    another.config = replace(another.config, taps=(0, 2))  # of the same shape
    with pytest.raises(ConfigError, match="another draft"):
        train(another, pool, target.head, PLAN, tmp_path / "part.pt", lambda line: None)


def test_slow_steps_are_kept_too(rig, tmp_path, monkeypatch):
    target, _, pool, network = rig
    monkeypatch.setattr(loop, "KEPT", 0.0)

    def stop(line):
        if line.startswith("step=2"):
            raise KeyboardInterrupt

    plan = replace(PLAN, save=500)
    with pytest.raises(KeyboardInterrupt):
        train(network(), pool, target.head, plan, tmp_path / "part.pt", stop)
    assert torch.load(tmp_path / "part.pt", weights_only=True)["step"] == 1


def test_the_command_from_prompts_to_a_draft(tmp_path):
    """And again with nothing left to do; other settings are refused before anything runs."""
    folder = write_tiny_checkpoint(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    asked = "".join(json.dumps({"turns": [f"{i} and {i}"]}) + "\n" for i in range(30))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "task.jsonl").write_text(asked)

    def shell(*more, out="out"):
        where = ["--target", str(folder), "--prompts", str(tmp_path / "p")]
        sizes = ["--steps", "2", "--batch", "2", "--anchors", "2", "--rank", "4", "--layers", "1"]
        few = ["--max-tokens", "12", "--samples", "1", "--taps", "0,1", "--mask-token", "3"]
        place = ["--out", str(tmp_path / out)]
        return CliRunner().invoke(main, [*where, *place, *sizes, *few, *more])

    first = shell()
    assert first.exit_code == 0, first.output
    record = json.loads((tmp_path / "out" / "draft" / "training.json").read_text())
    assert record["steps"] == 2 and record["texts"]["held_out"] > 0
    second = shell()
    assert second.exit_code == 0 and "step=" not in second.output
    for more, said in (
        (["--limit", "5"], "limit 0, not 5"),
        (["--rank", "8"], "another draft"),
        (["--steps", "3"], "other settings"),
    ):
        refused = shell(*more)
        assert refused.exit_code == 1 and said in refused.output, refused.output
    for more, said in (
        (["--taps", "x"], "--taps='x'"),
        (["--taps", "0,2"], "target_layer_ids has 2"),
        (["--mask-token", "100000"], "mask_token_id=100000"),
        (["--block", "0"], "block_size=0"),
        (["--rank", "-1"], "markov_rank=-1"),
        (["--steps", "0"], "--steps"),
        (["--device", "mps"], "--device='mps'"),
        (["--device", "fast"], "--device='fast'"),
    ):
        refused = shell(*more, out="none")
        assert refused.exit_code != 0 and said in refused.output, refused.output
    assert not (tmp_path / "none" / "answers.npz").exists()


def test_a_draft_may_begin_as_the_targets_last_layers(tmp_path):
    folder, draft = pair(tmp_path, "qwen3")
    checkpoint = open_checkpoint(resolve(str(folder)))
    target = Target(checkpoint, torch.device("cpu"))
    raw = json.loads((draft / "config.json").read_text())
    network = Network(raw, target.embed, target.norm)
    network.start_from(checkpoint)
    last = checkpoint.config["num_hidden_layers"] - 1
    mine = raw["num_hidden_layers"] - 1
    for name in ("self_attn.q_proj.weight", "self_attn.k_norm.weight", "mlp.down_proj.weight"):
        theirs = checkpoint.tensor(f"model.layers.{last}.{name}", torch.float32)
        assert torch.equal(network.get(f"layers.{mine}.{name}"), theirs)
    rows = torch.randn(3, network.get("fc.weight").shape[1])
    assert torch.equal(rows @ network.get("fc.weight").T, rows[:, -target.embed.shape[1] :])


def test_kept_states_are_the_same(rig):
    target, texts, pool, _ = rig
    kept = Pool(texts, np.arange(12), target, (0, 1), keep=True)
    for step in range(5):
        one, two = (p.batch(step, 4, 6, 0) for p in (pool, kept))
        assert torch.equal(one.anchors, two.anchors) and torch.equal(one.real, two.real)
        mine = torch.arange(one.ids.shape[1]) < one.lengths[:, None]
        assert torch.allclose(one.joined[mine], two.joined[mine], atol=1e-4)


def test_anchors_are_answer_tokens_with_another_behind(rig):
    _, texts, pool, _ = rig
    seen = set()
    for step in range(9):
        batch = pool.batch(step, 4, 50, 1)
        before, token, valid = batch.slots(5)
        for row in range(4):
            length = int(batch.lengths[row])
            for a, real in zip(batch.anchors[row].tolist(), batch.real[row].tolist(), strict=True):
                assert not real or 2 <= a < length - 1
            seen |= set(batch.anchors[row][batch.real[row]].tolist())
        first = valid[..., 0]
        assert torch.equal(first, batch.real)
        rows = torch.arange(4)[:, None].expand_as(batch.anchors)
        assert torch.equal(before[..., 0][first], batch.ids[rows, batch.anchors][first])
        behind = (batch.anchors + 1).clamp(max=batch.ids.shape[1] - 1)
        assert torch.equal(token[..., 0][first], batch.ids[rows, behind][first])
    assert seen == set(range(2, int(np.diff(texts.start).max()) - 1))


def test_the_rate_rises_and_falls():
    plan = TrainPlan(steps=100, lr=1.0)
    rates = [rate(step, plan) for step in range(100)]
    assert rates[3] == 1.0 and max(rates) == 1.0 and 0 < rates[0] < rates[1]
    assert all(a >= b for a, b in pairwise(rates[4:])) and rates[-1] < 1e-3


def test_the_divergence_gives_way_to_the_distance():
    plan = TrainPlan(steps=100, warm=0.5)
    shares = [divergence(step, plan) for step in range(100)]
    assert shares[0] == 1.0 and shares[25] == 0.5 and set(shares[50:]) == {0.0}
    assert divergence(0, TrainPlan(steps=100)) == 0.0


def test_noise_given_the_token_is_gumbel_noise():
    """Over tokens drawn from p it has Gumbel's mean and variance, and it draws just that token."""
    source = torch.Generator().manual_seed(0)
    head = torch.randn((7, 4), generator=source)
    final = torch.randn((1, 4), generator=source).expand(20001, 4)
    p = (final[0] @ head.T).softmax(0)
    ids = torch.multinomial(p, 20001, replacement=True, generator=source)
    noise = _noise(final, head, ids, (1, 20001), source)
    logp = p.log()
    assert torch.equal((noise + logp).argmax(1), ids[1:])
    assert (noise.mean(0) - 0.5772).abs().max() < 0.05
    assert (noise.var(0) - torch.pi**2 / 6).abs().max() < 0.12


def test_judged_as_the_engine_does(learn):
    """Rounds of the walk are rounds of the engine; greedy texts of a trained draft."""
    target, draft, _ = learn("dspark")
    asked, most = prompts(10, seed=4), 32
    options = {"model": str(draft), "mode": "static", "draft_weights": "same"}
    with LLM(str(target), max_model_len=96, num_threads=1, speculative=options) as llm:
        outs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
    rows = [[*ids, *out.outputs[0].token_ids] for ids, out in zip(asked, outs, strict=True)]
    texts = Texts(
        tokens=np.concatenate([np.array(row, np.int32) for row in rows]),
        start=np.cumsum([0, *map(len, rows)]),
        prompt=np.array([len(ids) for ids in asked], np.int32),
        hot=np.zeros(10, bool),
        held=np.ones(10, bool),
        task=np.zeros(10, np.int32),
        tasks=("tiny",),
    )
    plain = Plain(target, draft)
    pool = Pool(texts, np.arange(10), plain.target, plain.network.config.taps)
    rounds = walk(plain.network, pool, plain.target.head, np.arange(10), hot=False)
    engine = sum(most - 1 - out.metrics.accepted for out in outs)
    assert len(rounds.accepted) == engine
    found = summary(rounds, ("tiny",))
    assert found["accepted_length"] == pytest.approx(10 * (most - 1) / engine)
    assert found["by_task"] == {"tiny": found["accepted_length"]}
    temperatures, errors = fit(rounds)
    assert len(temperatures) == 5 and len(errors["after"]) == 5


def test_answers_of_a_target(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "t")
    said = json.loads((folder / "tokenizer_config.json").read_text()) if (
        folder / "tokenizer_config.json"
    ).exists() else {}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": TEMPLATE}))
    asked = [("math", "1 2"), ("chat", "hello"), ("chat", "long " * 40)]
    plan = AnswerPlan(samples=2, own=4, max_tokens=6, max_prompt=60)
    with LLM(str(folder), max_model_len=400, num_threads=1) as llm:
        texts, again = (write_answers(llm, asked, plan), write_waves(llm, asked, plan, 0.0))
    assert np.array_equal(texts.tokens, again.tokens)
    by_task = {name: int((texts.task == i).sum()) for i, name in enumerate(texts.tasks)}
    assert by_task["math"] == by_task["chat"] == 3  # the long one is left out
    assert texts.hot.sum() >= 4 and not texts.hot.all()
    assert len(texts.text(0)) > texts.prompt[0]
    twice = joined([texts, again])
    assert len(twice) == 2 * len(texts) and twice.tasks == texts.tasks
    assert np.array_equal(twice.text(len(texts)), texts.text(0))
    texts.save(tmp_path / "a.npz")
    back = Texts.read(tmp_path / "a.npz")
    assert back.tasks == texts.tasks and np.array_equal(back.start, texts.start)
    assert set(texts.tasks) <= {"math", "chat", OWN}


def test_time_bounds_a_run(rig, tmp_path):
    target, _, pool, network = rig
    steps = timed_steps(network(), pool, target.head, PLAN, 0.0)
    assert steps == 1 < timed_steps(network(), pool, target.head, PLAN, 1000.0)
    assert planned_steps(tmp_path / "none.pt") is None
    train(network(), pool, target.head, PLAN, tmp_path / "some.pt", lambda line: None)
    assert planned_steps(tmp_path / "some.pt") == PLAN.steps


def test_prompts_and_the_held_out_tenth(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["one", "more"]}\n{"turns": ["two"]}\n')
    assert list(read_prompts(tmp_path)) == [("a", "one"), ("a", "two")]
    assert list(read_prompts(tmp_path, 1)) == [("a", "one")]
    share = np.mean([held_out(str(i)) for i in range(5000)])
    assert 0.08 < share < 0.12
    (tmp_path / "b.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1"):
        list(read_prompts(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \*\.jsonl"):
        list(read_prompts(tmp_path / "empty"))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3_moe", "llama-bias"])
def test_other_targets_are_refused(tmp_path, family):
    folder = write_tiny_checkpoint(tmp_path / family, family)
    with pytest.raises(UnsupportedError):
        Target(open_checkpoint(resolve(str(folder))), torch.device("cpu"))
