"""Drafts as graphs, on a device whose graphs are the functions themselves."""

from functools import partial

import pytest
import torch
from deepinfer import SamplingParams
from deepinfer.api.speculative import DrafterTarget
from deepinfer.worker import loading
from deepinfer_speculative.dspark.recorded import Recorded
from draft_rig import Watched, engine, ids, prompts
from dspark_rig import pair


class Device:
    """Counts what it records, and what ran of it."""

    def __init__(self):
        self.shapes, self.replays, self.full = [], 0, False

    def capture(self, fn, shape):
        if self.full:
            raise torch.OutOfMemoryError("none left")
        self.shapes.append(shape)

        def replay():
            self.replays += 1
            return fn()

        return replay


def make(anchors, slots):
    return torch.stack((anchors + 1, slots), 1), slots[:, None].float()


def target_with(way, **has):
    return DrafterTarget(**{**has, "capture": way})


def told(recorded, key, *slots):
    slots = torch.tensor(slots)
    made = recorded(key, slots * 10, slots, make)
    return [part.tolist() for part in made] == [p.tolist() for p in make(slots * 10, slots)]


def test_the_second_of_a_size_is_recorded_and_the_rest_replayed():
    device = Device()
    recorded = Recorded(device.capture, 8)
    for slots in ([3], [5], [1, 2, 3], [6, 5, 4, 1], [0, 7, 2], range(9), range(9)):
        assert told(recorded, "a", *slots)
    assert (device.shapes, device.replays) == ([1, 4], 3)
    for _ in range(2):
        assert told(recorded, "b", 5)
    assert (device.shapes, device.replays) == ([1, 4, 1], 4)


def test_without_memory_for_graphs_drafts_are_launched():
    device = Device()
    recorded, device.full = Recorded(device.capture, 8), True
    assert all(told(recorded, "a", 2, 1) for _ in range(4))
    device.full = False
    assert all(told(recorded, "a", 2, 1) for _ in range(4)) and not device.shapes


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_recorded_drafts_are_the_launched_ones(tmp_path, monkeypatch, family, heat):
    """For any mix of requests, whose number changes as they end."""
    found, device = [], Device()
    asked = [
        SamplingParams(temperature=heat, seed=i, max_tokens=8 + 5 * i, top_k=(i % 3) * int(heat))
        for i in range(7)
    ]
    for capture in (None, device.capture):
        with monkeypatch.context() as patch:
            patch.setattr(loading, "DrafterTarget", partial(target_with, capture))
            watched = Watched(patch)
            with engine(*pair(tmp_path, family), {"mode": "static"}) as llm:
                texts = ids(llm.generate(prompts(7), asked))
        found.append((texts, sorted((text, drafts) for text, drafts, _ in watched.rounds)))
    assert found[0] == found[1] and device.replays > 10
