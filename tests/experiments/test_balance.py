"""The study of balancing rules in small: what the table claims about each."""

import json

import pytest

from experiments import balance


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return balance.Study(tokens=2048, experts=32, k=4, updates=10, out=tmp_path_factory.mktemp("balance"))


@pytest.fixture(scope="module")
def results(study):
    return balance.main(study)


def test_every_rule_against_the_sampling_floor(study, results):
    """All rules see the same tokens; the quantile rules end near the floor of sampling, which no rule undercuts by much."""
    floor = balance.settled(results[balance.EVEN])[1]
    assert floor == pytest.approx(study.formula_floor * (1 - study.k / study.experts) ** 0.5, rel=0.3)
    assert len({rows[0, 1] for name, rows in results.items() if name != balance.EVEN}) == 1
    ratio = {name: balance.settled(rows)[1] / floor for name, rows in results.items()}
    assert ratio["quantile"] < 2 and ratio["quantile_exact"] < 2 and ratio["none"] > 8
    for name in ("sign, step 1e-2", "load_quantile, step 1e-2", "aux_loss, Adam 3e-2"):
        assert 1 < ratio[name] < 0.95 * ratio["none"], name


def test_files(study, results):
    text = (study.out / "balance.md").read_text()
    assert all(f"| {name} " in text for name in results) and "Sampling floor: CV" in text
    record = json.loads((study.out / "balance.json").read_text())
    assert record["rules"]["quantile"]["load_cv"] == results["quantile"][:, 1].tolist()
    assert (study.out / "balance.png").stat().st_size > 20_000


def test_refuses():
    with pytest.raises(ValueError, match="at least 1"):
        balance.Study(updates=0)
    with pytest.raises(ValueError, match="k is 8 of 8 experts"):
        balance.Study(experts=8, k=8)
