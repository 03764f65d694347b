"""A model as the `generate` of `ruler`: prompts in, texts out, greedily, in batches of one shape.

B: rows of a batch, N: prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..infer import generate, prepare
from ..modules.model import HybridLM
from .ruler import Generate


def text_generator(
    model: HybridLM,
    variables: Any,
    tokenizer: Any,
    *,
    rows: int = 8,
    capacity: int | None = None,
    chunk: int = 2048,
    dtype: Any = None,
    state_dtype: str | None = None,
) -> Generate:
    """-> generate(prompts, max_new_tokens) for at most `rows` prompts a call; a text ends before EOS.

    A call with fewer prompts is filled up with its last one, so that all calls of a length share their programs. capacity: tokens of
    the cache, None: what each call needs; with a fixed one, other lengths compile only what is as long as they are. The rest is as in
    `moejax.infer.generate`. Ids that the tokenizer does not know (a vocabulary rounded up) are left out of the text.

    ValueError, from the call: more than `rows` prompts, a capacity that is too small.
    """
    weights = prepare(model, variables, dtype=dtype)
    stop = () if tokenizer.eos_id is None else (int(tokenizer.eos_id),)

    def texts(prompts: list[np.ndarray], max_new_tokens: int) -> Sequence[str]:
        if not 1 <= len(prompts) <= rows:
            raise ValueError(f"{len(prompts)} prompts in a call, rows={rows}; needed: 1 to `rows`, so give `ruler` batch={rows} at most.")
        filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
        settings: dict[str, Any] = {"capacity": capacity, "chunk": chunk, "state_dtype": state_dtype}
        made = generate(model, None, filled, max_new_tokens=max_new_tokens, stop_ids=stop, weights=weights, **settings)
        written = (made.row(row) for row in range(len(prompts)))
        return [tokenizer.decode(ids[ids < tokenizer.vocab_size], errors="replace") for ids in written]

    return texts
