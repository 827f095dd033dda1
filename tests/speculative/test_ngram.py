"""Prompt lookup against a search in plain Python; and no waiting for the device."""

import pytest
import torch
from deepinfer.errors import ConfigError
from deepinfer_speculative.ngram import NgramDrafter, latest_match
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode


def naive(text, most):
    """The longest match of the text's end, at its latest earlier place."""
    for size in range(min(most, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[-size:]:
                return size, end
    return 0, 0


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_it_finds_what_a_search_finds(texts, most):
    width = max(map(len, texts)) + 3
    table = torch.tensor([t + [9] * (width - len(t)) for t in texts])
    length = torch.tensor([len(t) for t in texts])
    matched, end = latest_match(table, length, most)
    assert list(zip(matched.tolist(), end.tolist(), strict=True)) == [naive(t, most) for t in texts]


class Context:
    method, model, options, max_num_seqs = "ngram", None, {}, 4

    def __init__(self, model=None, **options):
        self.model, self.options = model, options

    def draft_length(self, trained):
        assert trained is None
        return 5


class Target:
    device = torch.device("cpu")


class Slots:
    def __init__(self, *texts):
        width = 40
        self.longest = max(map(len, texts))
        self.tokens = torch.tensor([t + [77] * (width - len(t)) for t in texts]).int()
        self.length = torch.tensor([len(t) for t in texts])


def propose(*texts, **options):
    drafter = NgramDrafter(Context(**options), Target())
    drafter.bind(None, Slots(*texts))
    anchors = torch.tensor([t[-1] for t in texts])
    return drafter, drafter.propose(anchors, torch.arange(len(texts)))


def test_what_followed_is_drafted():
    _, drafts = propose([1, 2, 3, 4, 5, 6, 7, 1, 2], [5, 6, 7], [8])
    assert drafts.ids[0].tolist() == [3, 4, 5, 6, 7]
    assert drafts.drafted.tolist() == [5, 0, 0]
    assert drafts.confidence[1:].tolist() == [[0.0] * 5] * 2


def test_a_period_goes_on():
    _, drafts = propose([4, 1, 2, 3, 1, 2, 3])
    assert drafts.ids[0].tolist() == [1, 2, 3, 1, 2]


def test_the_longest_match_wins_and_rows_go_to_it_first():
    drafter, drafts = propose([1, 2, 3, 9, 3, 5, 1, 2, 3], [7, 4, 5, 6, 7])
    assert drafts.ids[0].tolist()[0] == 9, "three tokens match there, one at the later 3"
    assert drafts.confidence[0, 0] > drafts.confidence[1, 0]
    slots, eligible = torch.tensor([0, 1]), torch.tensor([5, 5])
    assert drafter.allot(slots, eligible, 3).tolist() == [3, 0]


def test_a_least_length():
    _, drafts = propose([1, 2, 3, 1], prompt_lookup_min=2)
    assert drafts.drafted.tolist() == [0]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max=0"),
        ({"prompt_lookup_min": True}, "prompt_lookup_min=True"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "is above"),
        ({"model": "some/draft"}, "takes no model"),
    ],
)
def test_odd_options_are_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        NgramDrafter(Context(**options), Target())


class Waits(TorchDispatchMode):
    """Ops that make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        for wait in ("_local_scalar_dense", "nonzero", "item", "masked_select", "equal", "unique"):
            assert not name.startswith(wait), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    drafter = NgramDrafter(Context(), Target())
    drafter.bind(None, Slots([1, 2, 3, 1, 2], [4]))
    slots = torch.arange(2)
    with Waits():
        drafter.propose(torch.tensor([2, 4]), slots)
        drafter.allot(slots, torch.tensor([5, 5]), 4)
