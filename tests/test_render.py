"""The picture of a pool says who holds what, for small and for large pools."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

import jaxkv

CONFIG = jaxkv.CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    block_size=8,
    num_blocks=16,
    max_sequences=3,
    max_blocks_per_sequence=8,
)


def shared_cache():
    """Slot 0 and a fork of it share a block, a prefix cache holds another alone."""
    cache, _ = jaxkv.reserve(jaxkv.init(CONFIG), [12, 0, 20], max_new_tokens=24)
    prefix = jaxkv.PrefixCache(CONFIG)
    cache = prefix.insert(cache, 2, list(range(20)))
    cache = jaxkv.trim(cache, [-1, -1, 8])
    cache = jaxkv.fork(cache, [0], [1])
    return jaxkv.trim(cache, [-1, 8, -1])


@pytest.mark.slow
def test_each_block_shows_its_holder():
    picture = jaxkv.render(shared_cache())
    # Blocks 0 and 1: slot 0, the first also slot 1. 2: slot 2 and the prefix cache. 3: that alone.
    assert picture.owners.tolist() == [-2, 0, -2, -3] + [-1] * 12
    assert str(picture).splitlines() == [
        repr(shared_cache()),
        "1 held by one slot, 12 free, 2 shared, 1 prefix cache alone",
        " 0 +0+*············",
        "· free, + shared, * prefix cache alone, 0-9a-Z one slot",
        "slot 0: 12 tokens in 2 blocks, 1 shared",
        "slot 1: 8 tokens in 1 blocks, 1 shared",
        "slot 2: 8 tokens in 1 blocks, 1 shared",
    ]
    assert repr(picture) == str(picture)


def test_stored_and_dropped_columns_are_listed():
    cache = shared_cache()
    tables = cache.block_tables.at[0].set(jnp.asarray([-7, -1, 5, 6, -1, -1, -1, -1]))
    sequences = dataclasses.replace(
        cache.sequences, block_tables=tables, lengths=cache.lengths.at[0].set(30)
    )
    text = str(jaxkv.render(dataclasses.replace(cache, sequences=sequences)))
    assert "\nslot 0: 30 tokens in 2 blocks, 1 stored, 1 dropped\n" in text


def test_counts_that_do_not_add_up_stand_out():
    cache = shared_cache()
    pool = dataclasses.replace(cache.pool, counts=cache.pool.counts.at[1].set(0))
    text = str(jaxkv.render(dataclasses.replace(cache, pool=pool)))
    assert " 0 +!+*" in text and "1 counts that do not add up" in text


def test_a_hundred_thousand_blocks_fit_on_a_screen():
    config = dataclasses.replace(
        CONFIG, num_blocks=100_000, max_sequences=40, max_blocks_per_sequence=2000
    )
    cache = jaxkv.init(config)
    # 39 sequences of 100 blocks each.
    tables = cache.block_tables.at[:39, :100].set(jnp.arange(3900).reshape(39, 100))
    cache = dataclasses.replace(
        cache,
        pool=dataclasses.replace(cache.pool, counts=cache.pool.counts.at[:3900].set(1)),
        sequences=jaxkv.sequences.Sequences(tables, cache.lengths.at[:39].set(800)),
    )
    lines = str(jaxkv.render(cache)).splitlines()
    assert len(lines) < 50 and max(map(len, lines[1:])) <= 80
    assert "3,900 held by one slot, 96,100 free" in lines[1]
    assert lines[2].split()[1].startswith("█" * 59) and lines[2].endswith("░····")
    assert lines[-1] == "and 23 more sequences"


def test_a_notebook_gets_an_svg_with_a_cell_per_block():
    html = jaxkv.render(shared_cache())._repr_html_()
    assert html.count("<rect") == 16
    assert "<title>block 1: slot 0</title>" in html
    assert "<title>block 3: prefix cache alone</title>" in html
    colors = re.findall(r'fill="(#\w+)"', html)
    assert len(set(colors)) == 4
    assert colors[0] == colors[2] and len(set(colors[4:])) == 1


def test_rich_prints_the_same_text_in_colour():
    rich = pytest.importorskip("rich.console")
    picture = jaxkv.render(shared_cache())
    console = rich.Console(width=100, record=True)
    with console.capture() as capture:
        console.print(picture)
    assert capture.get().splitlines() == str(picture).splitlines()
    assert picture.__rich__().spans


def test_a_contiguous_cache_is_drawn_too():
    cache, _ = jaxkv.reserve(jaxkv.init_contiguous(CONFIG, batch=2), [1, 0])
    assert "\n0 0·\n" in str(jaxkv.render(cache))
