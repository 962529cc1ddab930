"""Training sequences of a trajectory whose turns do not all continue each other.

An agent may shorten or summarise its history, start a sub-agent, or return to an earlier point. The turns then form a
tree (``Trajectory.turn_parents``). A training sequence is a path from a context's first turn to a turn that no other
turn continues. A turn on several paths is trained in the first one, and is only context in the others. Every sampled
token is thus trained exactly once, after the tokens that the sampler saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gdpo_nemo.data.images import Images
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Trajectory


class ContextTokens(NamedTuple):
    """Tokens of one training sequence of a trajectory."""

    prompt_ids: np.ndarray
    """int32 [prompt tokens]: prompt of the trajectory, or the tokens before the first turn of a new context."""
    indices: np.ndarray | slice
    """int64 [sequence's completion tokens]: index of each token in the completion of the trajectory. A slice of all
    tokens if the trajectory has one sequence."""
    loss_mask: np.ndarray | None
    """bool [sequence's completion tokens]: True for tokens that this sequence trains. None if it trains all tokens."""
    routing: np.ndarray | None = None
    """Rows of ``Trajectory.routing`` of the sequence's tokens, including its prompt."""
    images: Images = ()
    """Images of the sequence's tokens. Positions count from the first token of its prompt."""


def contexts_of(trajectory: Trajectory) -> list[ContextTokens]:
    """Return the tokens of each training sequence of a trajectory, at least one, in the order of their last turns."""
    t = trajectory
    if not t.turn_parents:
        return [ContextTokens(t.prompt.token_ids, slice(None), t.loss_mask, t.routing, t.prompt.images + t.images)]
    written = np.ones(len(t.completion_ids), bool) if t.loss_mask is None else t.loss_mask
    turns = turn_slices(t)
    claimed: set[int] = set()
    found = []
    for leaf in sorted(set(range(len(turns))) - set(t.turn_parents)):
        path = path_to(leaf, t.turn_parents)
        indices = np.concatenate([np.arange(turns[k].start, turns[k].stop) for k in path])
        is_new = np.repeat([k not in claimed for k in path], [turns[k].stop - turns[k].start for k in path])
        claimed.update(path)
        prompt = t.prompt.token_ids
        rows = np.concatenate([np.arange(len(prompt) if not path[0] else 0), indices + len(prompt)])
        if path[0]:
            context = int(written[turns[path[0]]].argmax())
            prompt = t.completion_ids[indices[:context]]
            indices, is_new = indices[context:], is_new[context:]
        routing = None if t.routing is None else t.routing[rows]
        images = among(t.prompt.images + t.images, rows)
        found.append(ContextTokens(prompt, indices, written[indices] & is_new, routing, images))
    return found


def among(images: Images, rows: np.ndarray) -> Images:
    """Return the images whose placeholders are among some tokens of a trajectory, with their positions among these.

    Args:
        images: images of prompt and completion.
        rows: ascending indices in prompt and completion. They contain all placeholders of an image, or none.
    """
    if not images:
        return ()
    starts = np.searchsorted(rows, np.array([placed.start for placed in images])).tolist()
    found = []
    for placed, start in zip(images, starts):
        if start < len(rows) and rows[start] == placed.start:
            found.append(placed._replace(start=start))
    return tuple(found)


def turn_slices(trajectory: Trajectory) -> list[slice]:
    """Return the completion tokens of each turn: the environment's tokens before the turn, and the turn.

    The turns must all have tokens.
    """
    t = trajectory
    last = np.cumsum(t.turn_tokens) - 1
    ends = ((last if t.loss_mask is None else np.flatnonzero(t.loss_mask)[last]) + 1).tolist()
    return list(map(slice, [0, *ends], ends))


def path_to(turn: int, parents: Sequence[int]) -> list[int]:
    """Return the turns of a context up to and including ``turn``, in order."""
    path = []
    while turn >= 0:
        path.append(turn)
        turn = parents[turn]
    return path[::-1]


def to_score(trajectories: Iterable[Trajectory]) -> list[TrainSequence]:
    """Return the sequences of the trajectories without advantages and weights, to compute log-probs."""
    sequences = []
    for number, t in enumerate(trajectories):
        for tokens in contexts_of(t):
            sequence = TrainSequence(
                tokens.prompt_ids,
                t.completion_ids[tokens.indices],
                t.logprobs[tokens.indices],
                loss_mask=tokens.loss_mask,
                routing=tokens.routing,
                images=tokens.images,
                trajectory=number,
                indices=tokens.indices,
            )
            sequences.append(sequence)
    return sequences


def by_trajectory(
    sequences: Sequence[TrainSequence], values: Sequence[np.ndarray | None], trajectories: Sequence[Trajectory]
) -> dict[int, np.ndarray]:
    """Combine the token values of sequences into one array for each trajectory with values.

    Args:
        sequences: sequences of ``trajectories``, to which ``TrainSequence.trajectory`` refers.
        values: [completion tokens] for each sequence. None for a sequence without values.

    Returns:
        [completion tokens] by the index of the trajectory. If a trajectory has several sequences, tokens that no
        sequence trains have the value NaN.
    """
    found: dict[int, np.ndarray] = {}
    for s, of_sequence in zip(sequences, values, strict=True):
        if of_sequence is None:
            continue
        if isinstance(s.indices, slice):
            found[s.trajectory] = of_sequence
            continue
        length = len(trajectories[s.trajectory].completion_ids)
        joined = found.setdefault(s.trajectory, np.full(length, np.nan, of_sequence.dtype))
        joined[s.indices[s.loss_mask]] = of_sequence[s.loss_mask]
    return found
