"""The first 20 losses of the tiny preset on the synthetic corpus: the same within 1e-3 on every supported version.

`python tests/train/test_loss_record.py` writes the record anew; do so only when the numbers are meant to change.
"""

import json
import pathlib

import jax
import numpy as np

from moejax import HybridLM, presets
from moejax.data import ByteTokenizer, PackedBatches, TokenStream, synthetic_corpus
from moejax.train import OptimizerConfig, adamw, init_state, make_train_step

RECORD = pathlib.Path(__file__).parent.parent / "golden" / "loss_record.json"
STEPS = 20


def losses() -> list[float]:
    stream = TokenStream(synthetic_corpus(documents=16).train, ByteTokenizer())
    batches = PackedBatches(stream, context=96, batch_size=4, seed=0)
    model = HybridLM(presets.get("tiny").replace(dtype="float32"))
    optimizer = adamw(OptimizerConfig(learning_rate=1e-4, total_steps=STEPS))
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
    values = []
    for index in range(STEPS):
        state, metrics = step(state, batches.batch(index))
        values.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    return values


def test_loss_record():
    np.testing.assert_allclose(losses(), json.loads(RECORD.read_text())["loss"], rtol=0, atol=1e-3)


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"jax": jax.__version__, "loss": losses()}, indent=1) + "\n")
