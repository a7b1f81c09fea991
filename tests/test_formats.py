import pytest

from jaxkv import formats
from jaxkv.formats import FORMATS, Format

SYMMETRIC = ("bf16", "f16", "int8", "fp8", "nvfp4", "turbo8", "turbo4", "turbo3", "turbo2")


def test_the_nine_formats_exist():
    assert tuple(sorted(FORMATS)) == tuple(sorted(SYMMETRIC))


@pytest.mark.parametrize("name", [*formats.format_names(), *formats.ALIASES, "int8k_turbo4v"])
def test_printed_name_parses_back(name):
    fmt = Format.parse(name)
    assert Format.parse(str(fmt)) == fmt
    assert Format.parse(fmt) is fmt


@pytest.mark.parametrize("k", SYMMETRIC)
@pytest.mark.parametrize("v", SYMMETRIC)
def test_any_pair_parses(k, v):
    fmt = Format.parse(f"{k}k_{v}v")
    assert (fmt.k.name, fmt.v.name) == (k, v)
    assert fmt.is_asymmetric == (k != v)
    assert fmt == Format.parse(str(fmt))


def test_aliases_and_names():
    assert str(Format.parse("fp8k4v")) == "fp8k_turbo4v"
    assert Format.parse("bf16k_bf16v") == Format.parse("bf16")
    assert formats.ALIASES["turbo3k8v"] == "turbo3k_turbo8v"
    assert len(formats.ALIASES) == len(formats.PAIR_NAMES) == 9


@pytest.mark.parametrize("name", ["", "fp9", "FP8", "fp8k4", "turbo5k_fp8v", "fp8k_4v", "bf16 "])
def test_unknown_name_lists_every_accepted_name(name):
    with pytest.raises(ValueError) as error:
        Format.parse(name)
    for accepted in (*formats.format_names(), *formats.ALIASES):
        assert accepted in str(error.value)


def test_a_name_must_be_a_string():
    with pytest.raises(TypeError, match="format: expected a name"):
        Format.parse(4)


@pytest.mark.parametrize(
    ("name", "bits", "group", "rotated"),
    [
        ("bf16", 16, None, False),
        ("f16", 16, None, False),
        ("fp8", 8, None, False),
        ("int8", 8, None, False),
        ("turbo8", 9, 16, True),
        ("nvfp4", 4.5, 16, False),
        ("turbo4", 4.5, 16, True),
        ("turbo3", 3.5, 16, True),
        ("turbo2", 2.5, 16, True),
    ],
)
def test_bits_groups_and_rotation(name, bits, group, rotated):
    fmt = FORMATS[name]
    assert (fmt.bits_per_element, fmt.group_size, fmt.is_rotated) == (bits, group, rotated)


@pytest.mark.parametrize("name", ["turbo4", "turbo3", "turbo2"])
@pytest.mark.parametrize("encoding", formats.ENCODINGS)
def test_codebooks_are_symmetric_without_zero(name, encoding):
    book = FORMATS[name].codebook(encoding)
    assert len(book.levels) == 2 ** FORMATS[name].bits == len(book.bounds) + 1
    assert 0 not in book.levels and 0 in book.bounds
    assert [-x for x in reversed(book.levels)] == list(book.levels)
    for low, bound, high in zip(book.levels, book.bounds, book.levels[1:]):
        assert low < bound < high


def test_only_codebook_formats_have_codebooks():
    with pytest.raises(ValueError, match="nvfp4"):
        FORMATS["nvfp4"].codebook("searched")


@pytest.mark.parametrize("head_dim", [0, -16, 8, 20, 100])
def test_side_refuses_a_head_that_groups_do_not_divide(head_dim):
    with pytest.raises(ValueError, match=f"head_dim: got {head_dim}"):
        formats.SideSpec(FORMATS["bf16"], head_dim)


def test_side_of_an_unrotated_format_has_no_rotation():
    assert formats.SideSpec(FORMATS["fp8"], 64, rotation="signs").rotation == "none"
    assert formats.SideSpec(FORMATS["turbo4"], 64).rotation == "signs"
