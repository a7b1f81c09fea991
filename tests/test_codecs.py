import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_only

from jaxkv import codecs
from jaxkv.codecs import floats, packing
from jaxkv.formats import ENCODINGS, FORMATS, SideSpec

pytestmark = pytest.mark.as_shipped

NAMES = tuple(FORMATS)
GROUPED = ("nvfp4", "turbo4", "turbo3", "turbo2")
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256, 512)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


GOLDEN = {
    "turbo4": ("33", "10 21 43 75 a8 cb ed fe"),
    "turbo3": ("36", "40 22 6d 64 6b ff"),
    "turbo2": ("39", "40 55 aa fe"),
    "nvfp4": ("2a", "ff ee cd 9a 21 54 66 77"),
    "turbo8": ("89 3b", "fe fc fa f8 f5 f1 eb df 5f 6b 71 75 78 7a 7c 7e"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_group(name):
    x = jnp.asarray((np.arange(16) - 7.5) / 4, jnp.float32)
    data, scales = codecs.to_bytes(codecs.encode(x, name, encoding="reference", rotate=False))
    assert (scales.tobytes().hex(" "), data.tobytes().hex(" ")) == GOLDEN[name]


DISTORTION = {
    ("bf16", "reference"): 2.7e-6,
    ("int8", "reference"): 3.5e-5,
    ("fp8", "reference"): 7.1e-4,
    ("turbo8", "reference"): 5.0e-4,
    ("turbo4", "reference"): 5.87e-3,
    ("turbo3", "reference"): 2.42e-2,
    ("turbo2", "reference"): 1.29e-1,
    ("nvfp4", "reference"): 9.04e-3,
    ("turbo4", "searched"): 5.15e-3,
    ("turbo3", "searched"): 2.15e-2,
    ("turbo2", "searched"): 9.59e-2,
    ("nvfp4", "searched"): 7.39e-3,
}


@pytest.mark.parametrize(
    ("name", "encoding"),
    fast_only(DISTORTION, [("int8", "reference"), ("turbo4", "searched"), ("nvfp4", "searched")]),
)
def test_distortion_of_gaussian_input(name, encoding):
    x = normal(8000, 64)
    got = codecs.decode(codecs.encode(x, name, encoding=encoding))
    mse = float(((got - x) ** 2).mean() / (x**2).mean())
    assert mse == pytest.approx(DISTORTION[name, encoding], rel=0.05)


@pytest.mark.parametrize("bits,mse", [(4, 0.0095010), (3, 0.0345478), (2, 0.1174818)])
def test_distortion_of_the_levels_alone(bits, mse):
    book = FORMATS[f"turbo{bits}"].codebook("reference")
    x = np.random.default_rng(1).standard_normal(1_000_000)
    nearest = np.asarray(book.levels)[np.searchsorted(book.bounds, x)]
    assert ((nearest - x) ** 2).mean() == pytest.approx(mse, rel=0.01)


@pytest.mark.parametrize("head_dim", fast_only(HEAD_DIMS, [80]))
@pytest.mark.parametrize("rotation", ["signs", "hadamard"])
def test_rotation_is_orthogonal(head_dim, rotation):
    spec = SideSpec(FORMATS["turbo4"], head_dim, rotation=rotation)
    x = normal(3, head_dim)
    y = codecs.rotate(x, spec)
    # f32 sums of head_dim terms: a few ulp of the largest.
    chex.assert_trees_all_close(codecs.unrotate(y, spec), x, atol=3e-6)
    chex.assert_trees_all_close((y * y).sum(-1), (x * x).sum(-1), rtol=1e-5)
    twice = codecs.rotate(y, spec)
    if rotation == "hadamard":
        chex.assert_trees_all_close(twice, x, atol=3e-6)
    else:
        assert float(jnp.abs(twice - x).max()) > 0.1


@pytest.mark.parametrize("head_dim,block", [(80, 16), (96, 32), (112, 16), (192, 64), (64, 64)])
def test_rotation_stays_inside_its_power_of_two_block(head_dim, block):
    matrix = codecs.rotation_matrix(head_dim, "signs")
    inside = np.kron(np.eye(head_dim // block), np.ones((block, block))) > 0
    assert (np.abs(matrix[inside]) == 1).all() and (matrix[~inside] == 0).all()


def test_sign_tables_golden():
    def bits(signs):
        return sum(1 << i for i, s in enumerate(signs) if s < 0)

    before, after = codecs.sign_tables(128)
    assert bits(before) == 0x49F250A9A4C63BBB42F85949E46A0359
    assert bits(after) == 0xBEA56562B7A5357A3F628FDC16ACEE90
    for n in (256, 512):
        legacy = np.random.RandomState(42)
        np.testing.assert_array_equal(codecs.sign_tables(n)[0], legacy.choice([-1, 1], n))


def test_rotation_applies_signs_first_and_last():
    before, after = codecs.sign_tables(64)
    spec = SideSpec(FORMATS["turbo4"], 64)
    x = np.zeros(64, np.float32)
    x[5] = 1
    hadamard = codecs.rotation_matrix(64, "hadamard")
    expected = after * hadamard[5] * before[5] / 8
    chex.assert_trees_all_close(codecs.rotate(jnp.asarray(x), spec), expected, atol=0)


def test_e4m3_rounds_to_nearest_even_and_saturates():
    import ml_dtypes

    every = np.arange(256, dtype=np.uint8)
    exact = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(floats.from_e4m3(jnp.asarray(every))), exact)
    finite = every[np.isfinite(exact)]
    np.testing.assert_array_equal(np.asarray(floats.to_e4m3(exact[finite])), finite)
    grid = np.sort(np.abs(exact[np.isfinite(exact)]))
    middle = np.unique((grid[1:] + grid[:-1]) / 2)
    around = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    ).astype(np.float32)
    expected = around.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(floats.to_e4m3(jnp.asarray(around))), expected)
    big = jnp.asarray([448.0, 465.0, 1e30, jnp.inf, -1e30, jnp.nan])
    assert [int(b) for b in floats.to_e4m3(big)] == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F]


def test_e2m1_rounds_to_nearest_even_and_keeps_the_sign():
    x = jnp.asarray([0.0, -0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 99.0, -0.25])
    assert floats.to_e2m1(x).tolist() == [0, 8, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 8]
    values = floats.from_e2m1(jnp.arange(16, dtype=jnp.uint8))
    np.testing.assert_array_equal(values[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(values[8:], -values[:8])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", fast_only(HEAD_DIMS, [80]))
def test_planar_words(bits, head_dim):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, head_dim), dtype=np.uint8)
    planes = packing.pack(jnp.asarray(codes), bits)
    np.testing.assert_array_equal(packing.unpack(planes, bits), codes)
    assert [p.shape[-1] for p in planes] == list(packing.plane_words(head_dim, bits))
    shift = 0
    for (width, word), plane in zip(packing.PLANES[bits], planes):
        row = np.asarray(plane).astype(word.newbyteorder("<")).view(np.uint8)
        per_row = head_dim * width // 8
        for k in range(8 // width):
            field = (row >> (k * width)) & (2**width - 1)
            expected = (codes[:, k * per_row : (k + 1) * per_row] >> shift) & (2**width - 1)
            np.testing.assert_array_equal(field, expected)
        shift += width


def test_canonical_packing_is_least_significant_first():
    codes = np.arange(16, dtype=np.uint8)
    assert packing.to_canonical(codes, 4)[:2].tolist() == [0x10, 0x32]
    word = int.from_bytes(packing.to_canonical(codes[:8] % 8, 3).tobytes(), "little")
    assert [(word >> (3 * j)) & 7 for j in range(8)] == list(range(8))
    assert packing.to_canonical(codes[:4], 2).tolist() == [0b11100100]
    for bits in (2, 3, 4):
        c = codes % 2**bits
        np.testing.assert_array_equal(
            packing.from_canonical(packing.to_canonical(c, bits), bits), c
        )


@pytest.mark.parametrize("name", fast_only(NAMES, ["int8", "turbo8", "turbo3"]))
@pytest.mark.parametrize("head_dim", fast_only([32, 64, 80, 192], [80]))
def test_canonical_bytes_round_trip(name, head_dim):
    encoded = codecs.encode(normal(3, 2, head_dim), name)
    data, scales = codecs.to_bytes(encoded)
    fmt = FORMATS[name]
    assert data.size == fmt.data_bytes(6 * head_dim)
    assert scales.size == fmt.scale_bytes(6 * head_dim, head_dim)
    planes, stored = codecs.from_canonical_bytes(data, scales, (3, 2), encoded.spec)
    chex.assert_trees_all_equal((planes, stored), (encoded.data, encoded.scales))


@pytest.mark.parametrize("name", fast_only(NAMES, ["bf16", "fp8", "turbo4"]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_zeros_stay_finite_and_small(name, encoding):
    got = codecs.decode(codecs.encode(jnp.zeros((2, 64)), name, encoding=encoding))
    # turbo8 keeps its smallest scale, but codes of zeros are zero; all others are exact zeros.
    chex.assert_trees_all_equal(got, jnp.zeros((2, 64)))


@pytest.mark.parametrize("name,code", [("turbo4", 8), ("turbo3", 4), ("turbo2", 2)])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_zero_group_has_the_first_positive_code_and_scale_zero(name, code, encoding):
    encoded = codecs.encode(jnp.zeros(64), name, encoding=encoding, rotate=False)
    bits = FORMATS[name].bits
    assert set(packing.unpack(encoded.data, bits).tolist()) == {code}
    assert set(np.asarray(packing.to_bytes(encoded.scales)).tolist()) == {0}


def test_nvfp4_zero_scale_keeps_signs_only():
    x = jnp.asarray([1e-9, -1e-9] * 8)
    encoded = codecs.encode(x, "nvfp4", encoding="reference")
    assert packing.unpack(encoded.data, 4).tolist() == [0, 8] * 8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", fast_only([np.nan, np.inf, -np.inf], [np.inf]))
def test_non_finite_reads_back_as_nan_and_is_counted(name, value):
    x = np.array(normal(4, 64))
    x[2, 20] = value
    fmt = FORMATS[name]
    spec = SideSpec(fmt, 64)
    encoded, audit = codecs.encode_rows(jnp.asarray(x), spec)
    bad = np.isnan(np.asarray(codecs.decode(encoded)))
    lost = slice(None) if fmt.is_rotated or name == "int8" else slice(16, 32)
    if fmt.group_size is None and name != "int8":
        lost = slice(20, 21)
    expected = np.zeros((4, 64), bool)
    expected[2, lost] = True
    np.testing.assert_array_equal(bad, expected)
    assert audit.non_finite.tolist() == [0, 0, 1, 0]


def test_fp8_uses_its_scale_both_ways_and_counts_saturation():
    x = jnp.asarray([[100.0, -470.0, 477.0, 9000.0] * 4])
    spec = SideSpec(FORMATS["fp8"], 16)
    _, audit = codecs.encode_rows(x, spec)
    assert audit.saturated.tolist() == [8]
    scaled = codecs.encode(x, "fp8", scale=32.0)
    chex.assert_trees_all_close(codecs.decode(scaled), x, rtol=2**-4)
    _, audit = codecs.encode_rows(x, spec, jnp.float32(32))
    assert audit.saturated.tolist() == [0]


def test_f16_and_int8_saturate_instead_of_overflowing():
    x = jnp.asarray([[1e6, -1e6, 1.0, 65504.0] * 4])
    encoded, audit = codecs.encode_rows(x, SideSpec(FORMATS["f16"], 16))
    np.testing.assert_array_equal(codecs.decode(encoded)[0, :4], [65504, -65504, 1, 65504])
    assert audit.saturated.tolist() == [8]
    encoded, audit = codecs.encode_rows(x * 1e9, SideSpec(FORMATS["int8"], 16))
    assert audit.saturated.tolist() == [1]
    assert float(encoded.scales[0]) == 65504


def test_int8_keeps_rows_whose_scale_would_underflow():
    x = jnp.full((1, 16), 1e-7)
    encoded = codecs.encode(x, "int8")
    assert float(encoded.scales[0]) == 2.0**-24
    assert float(jnp.abs(codecs.decode(encoded) - x).max()) <= 2.0**-25


@pytest.mark.parametrize("name", GROUPED)
def test_flushed_groups_are_counted(name):
    x = np.array(normal(2, 64))
    x[1] *= 1e-6
    _, audit = codecs.encode_rows(jnp.asarray(x), SideSpec(FORMATS[name], 64))
    assert audit.flushed.tolist() == [0, 4]
    _, zero = codecs.encode_rows(jnp.zeros((1, 64)), SideSpec(FORMATS[name], 64))
    assert zero.flushed.tolist() == [0]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_group_scales_at_their_maximum_are_counted(name, encoding):
    x = normal(2, 64) * jnp.asarray([[1.0], [1e5]])
    spec = SideSpec(FORMATS[name], 64, encoding)
    _, audit = codecs.encode_rows(x, spec)
    assert audit.saturated.tolist() == [0, 4]


@pytest.mark.parametrize("name", fast_only(GROUPED, ["turbo4"]))
def test_search_never_does_worse_than_its_first_candidate(name):
    x = normal(500, 64)
    spec = SideSpec(FORMATS[name], 64)

    def group_errors(encoding):
        rows = codecs.encode(x, name, encoding=encoding)
        error = codecs.rotate(codecs.decode(rows), spec) - codecs.rotate(x, spec)
        return (error.reshape(-1, 16) ** 2).sum(-1)

    searched, reference = group_errors("searched"), group_errors("reference")
    if name == "nvfp4":  # the first candidate is the reference itself
        assert bool((searched <= reference * (1 + 1e-4)).all())
    assert float(searched.mean()) < float(reference.mean())


@pytest.mark.parametrize("name", ["turbo4", "turbo3", "turbo2"])
def test_ties_go_up(name):
    # amax is exactly the top level, so one unit is 1 and every bound is hit exactly.
    book = FORMATS[name].codebook("reference")
    unit = np.float32(np.float32(book.top) * np.float32(1 / book.top))
    bounds = np.asarray(book.bounds, np.float32) * unit
    x = np.zeros(16, np.float32)
    x[: len(bounds)] = bounds
    x[15] = np.float32(book.top)
    encoded = codecs.encode(jnp.asarray(x), name, encoding="reference", rotate=False)
    codes = packing.unpack(encoded.data, FORMATS[name].bits)
    assert codes[: len(bounds)].tolist() == list(range(1, len(bounds) + 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "dtype", fast_only([jnp.bfloat16, jnp.float16, jnp.float32], [jnp.float32])
)
def test_pages_hold_what_was_scattered_and_nothing_else(name, dtype):
    spec = SideSpec(FORMATS[name], 80)
    pages = codecs.init_pages(5, 2, 8, spec)
    poison = jax.tree.map(lambda a: jnp.full_like(a, 7), pages)
    x = normal(3, 2, 80).astype(dtype)
    rows, _ = codecs.encode_rows(x, spec)
    out = codecs.scatter_rows(poison, rows, jnp.asarray([4, 0, 5]), jnp.asarray([3, 7, 0]))
    decoded = codecs.decode_pages(out, spec)
    expected = codecs.decode_rows(rows.data, rows.scales, spec)
    chex.assert_trees_all_equal(decoded[4, :, 3], expected[0])
    chex.assert_trees_all_equal(decoded[0, :, 7], expected[1])
    untouched = codecs.decode_pages(poison, spec)
    rest = np.ones((5, 8), bool)
    rest[4, 3] = rest[0, 7] = False
    for b, o in zip(*np.nonzero(rest)):
        chex.assert_trees_all_equal(decoded[b, :, o], untouched[b, :, o])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_pages_take_the_bytes_the_format_says(name, head_dim):
    spec = SideSpec(FORMATS[name], head_dim)
    pages = codecs.init_pages(3, 2, 16, spec)
    elements = 3 * 2 * 16 * head_dim
    fmt = FORMATS[name]
    assert pages.nbytes == fmt.data_bytes(elements) + fmt.scale_bytes(elements, head_dim)
    if head_dim == 64 and fmt.scale == "group_e4m3":
        assert pages.scales.dtype == jnp.uint32 and pages.scales.shape == (3, 2, 1, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "fp8k_turbo4v"}, "expected one side's format"),
        ({"format": "fp8", "rotate": True}, "not rotated"),
        ({"format": "int8", "scale": 2.0}, "computes its own"),
        ({"format": "int4"}, "unknown name"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        codecs.encode(jnp.zeros((1, 16)), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_jit_and_plain_agree_on_every_byte(name):
    x = normal(50, 64)
    plain = codecs.encode(x, name)
    jitted = jax.jit(lambda x: codecs.encode(x, name))(x)
    chex.assert_trees_all_equal(plain, jitted)
