import dataclasses

import pytest

import jaxkv
from jaxkv.config import CacheConfig, boundary_formats


def make(**fields):
    return CacheConfig(**{"num_layers": 2, "num_kv_heads": 2, "head_dim": 256, **fields})


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("bf16", 16384),
        ("f16", 16384),
        ("fp8", 8192),
        ("int8", 8256),
        ("nvfp4", 4608),
        ("turbo4", 4608),
        ("turbo3", 3584),
        ("turbo2", 2560),
        ("turbo8", 9216),
    ],
)
def test_golden_block_bytes(name, nbytes):
    config = make(format=name, block_size=16)
    assert config.block_bytes() == (nbytes, nbytes)
    assert config.block_bytes_total == 4 * nbytes


def test_golden_budgets():
    fp8 = make(num_layers=12, format="fp8")
    assert (fp8.block_bytes_total, fp8.blocks_that_fit(1_000_000)) == (196608, 5)
    nvfp4 = make(num_layers=12, format="nvfp4")
    assert (nvfp4.block_bytes_total, nvfp4.blocks_that_fit(1_000_000)) == (110592, 9)
    mixed = make(num_layers=12, format="nvfp4", layer_formats=("bf16", "bf16"))
    assert (mixed.block_bytes_total, mixed.blocks_that_fit(1_000_000)) == (157696, 6)


def test_strides_split_data_and_scales():
    assert make(format="turbo4").block_strides() == ((4096, 512), (4096, 512))
    assert make(format="fp8k_turbo8v").block_strides() == ((8192, 0), (8192, 1024))


def test_layers_override_formats_and_dims():
    config = make(
        num_layers=3,
        format="turbo4",
        v_head_dim=128,
        layer_formats=("bf16k_turbo2v",),
        layer_dims=((4, 64), (1, 128, 32)),
    )
    assert str(config.layer(0).format) == "bf16k_turbo2v"
    shapes = [(s.num_kv_heads, s.head_dim, s.v_head_dim) for s in map(config.layer, range(3))]
    assert shapes == [(4, 64, 64), (1, 128, 32), (2, 256, 128)]
    assert config.block_elements(2) == (16 * 2 * 256, 16 * 2 * 128)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers: got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads: got -1"),
        ({"head_dim": 72}, "head_dim: got 72, expected a positive multiple of 16"),
        ({"v_head_dim": 24}, "head_dim: got 24"),
        ({"block_size": 12}, "block_size: got 12, expected a multiple of 8"),
        ({"num_blocks": 0}, "num_blocks: got 0"),
        ({"num_blocks": 2**28}, "num_blocks: got 268435456"),
        ({"max_blocks_per_sequence": 2**28}, "max_blocks_per_sequence: got"),
        ({"max_sequences": 0}, "max_sequences: got 0"),
        ({"format": "fp7"}, "unknown name 'fp7'"),
        ({"layer_formats": ("bf16",) * 3}, "layer_formats: got 3 entries"),
        ({"layer_dims": ((1,),)}, r"layer_dims\[0\]: got \(1,\)"),
        ({"layer_dims": ((2, 40),)}, "head_dim: got 40"),
        ({"encoding": "best"}, "encoding: got 'best'"),
        ({"rotation": "none"}, "rotation: got 'none'"),
        ({"trace_events": -1}, "trace_events: got -1"),
    ],
)
def test_bad_geometry_names_field_value_and_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_wrong_types_are_type_errors():
    with pytest.raises(TypeError, match=r"num_layers: got 2\.0"):
        make(num_layers=2.0)
    with pytest.raises(TypeError, match="layer: got"):
        make().layer(1.0)
    with pytest.raises(ValueError, match="layer: got 2, expected 0 to 1"):
        make().layer(2)


def test_json_round_trip_hash_and_equality():
    config = make(format="fp8k4v", layer_formats=["bf16"], layer_dims=[[2, 64]], debug=True)
    again = CacheConfig.from_json(config.to_json())
    assert again == config and hash(again) == hash(config)
    assert dataclasses.replace(config, num_blocks=7) != config
    assert jaxkv.CacheConfig is CacheConfig


@pytest.mark.parametrize("text", ["[]", '{"num_layers": 1, "colour": 3}', '{"num_layers": 1}'])
def test_from_json_refuses_what_is_no_config(text):
    with pytest.raises(ValueError, match="config: "):
        CacheConfig.from_json(text)


def test_bits_per_element_counts_scales():
    assert make(format="turbo4").bits_per_element == 4.5
    assert make(format="int8", head_dim=64).bits_per_element == 8.25
    assert make(format="fp8k_turbo4v").bits_per_element == 6.25


@pytest.mark.parametrize(
    ("name", "num_layers", "high", "ends"),
    [
        ("turbo4", 12, "auto", 2),
        ("turbo4k_turbo2v", 30, "auto", 4),
        ("fp8k_turbo3v", 30, "auto", 2),
        ("turbo3", 11, "auto", 0),
        ("nvfp4", 30, "auto", 0),
        ("int8", 30, "auto", 0),
        ("int8", 6, 3, 3),
        ("turbo2", 30, 0, 0),
    ],
)
def test_boundary_layers_are_bf16(name, num_layers, high, ends):
    formats = [str(f) for f in boundary_formats(name, num_layers, high)]
    assert formats == ["bf16"] * ends + [name] * (num_layers - 2 * ends) + ["bf16"] * ends


def test_boundary_layers_count_in_the_reported_bits():
    formats = boundary_formats("turbo2", 30, high=4)
    config = make(num_layers=30, format="turbo2", layer_formats=formats)
    assert config.bits_per_element == pytest.approx((22 * 2.5 + 8 * 16) / 30)
    assert {str(f) for f in boundary_formats("turbo2", 5, "all")} == {"bf16"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("turbo4", 30, 16), ValueError, "high: got 16, expected 0 to 15"),
        (("turbo4", 30, -1), ValueError, "high: got -1"),
        (("turbo4", 30, "some"), TypeError, "high: got 'some'"),
        (("turbo4", 0), ValueError, "num_layers: got 0"),
        (("turbo5", 30), ValueError, "unknown name 'turbo5'"),
    ],
)
def test_boundary_formats_that_cannot_be_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        boundary_formats(*arguments)
