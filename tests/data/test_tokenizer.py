import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import ByteTokenizer

TOKENIZER = ByteTokenizer()


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=200))
def test_any_str_round_trips(text):
    ids = TOKENIZER.encode(text, bos=True, eos=True)
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None)  # a busy machine is no failure
@given(st.binary(max_size=300))
def test_any_bytes_round_trip_and_make_no_special(data):
    ids = TOKENIZER.encode(data)
    assert ids.dtype == np.int32 and len(ids) == len(data)
    assert (ids < 256).all()
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(data, bos=True, eos=True)) == data


def test_control_tokens_are_never_found_in_text():
    assert TOKENIZER.encode("<|eos|>", control_tokens=False).max() < 256
    with pytest.raises(ValueError, match="control_tokens=True"):
        TOKENIZER.encode("<|eos|>", control_tokens=True)


def test_special_ids_are_distinct_and_reserved():
    ids = list(TOKENIZER.special_ids.values())
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 256 and max(ids) < TOKENIZER.vocab_size == 320
    for name in ("pad", "bos", "eos", "doc_sep"):
        assert getattr(TOKENIZER, f"{name}_id") == TOKENIZER.special_ids[name]
    assert {"user", "assistant", "image_patch"} <= set(TOKENIZER.special_ids)


def test_bos_and_eos_stand_at_the_ends_only():
    assert TOKENIZER.encode("ab", bos=True, eos=True).tolist() == [257, 97, 98, 258]
    assert TOKENIZER.encode("").tolist() == []
    assert TOKENIZER.decode([]) == ""


def test_specials_can_be_shown():
    ids = [257, 97, 0xC3, 256, 0xA4, 258, 319]
    shown = "<|bos|>a\ufffd<|pad|>\ufffd<|eos|><|reserved_319|>"
    assert TOKENIZER.decode(ids, errors="replace", show_special=True) == shown
    assert TOKENIZER.decode([97, 258]) == "a"


@pytest.mark.parametrize("ids", [[320], [-1], [0.5], [True, False]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match=r"token ids hold .*\[0, 320\)"):
        TOKENIZER.decode(ids)


def test_only_text_is_encoded():
    with pytest.raises(ValueError, match="text is int"):
        TOKENIZER.encode(7)  # pyright: ignore[reportArgumentType]
