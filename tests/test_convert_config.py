"""The config.json a conversion writes."""

import dataclasses

import pytest
from drafter_files import read_config, small_config, write_drafter

from mlx_dflash2.convert import to_mlx, to_torch
from mlx_dflash2.convert.settings import published_config
from mlx_dflash2.families import DFlash2Config

TRAINING = {  # a training run's schema: everything at the top, spelled its own way
    "architectures": None,
    "model_type": "qwen3_dflash2",
    "dflash_config": None,
    "block_size": 8,
    "mask_token_id": 3,
    "target_layer_ids": [1, 3],
    "num_target_layers": 2,
    "target_num_hidden_layers": 6,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 128,
    "selector_top_k": 4,
    "rope_theta": None,
    "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"},
}


def published(raw: dict, **arguments) -> dict:
    return published_config(raw, DFlash2Config.from_dict(raw), **arguments)


def test_a_published_config_keeps_its_content():
    raw = small_config(chat_note="kept", is_causal=False)
    assert published(raw, dtype="bfloat16") == raw


def test_the_source_config_is_not_changed():
    raw = small_config(**TRAINING)
    published(raw, dtype="float16")
    assert raw == small_config(**TRAINING)


def test_a_training_schema_becomes_the_published_one():
    written = published(small_config(**TRAINING))
    assert written["architectures"] == ["DFlash2DraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["num_target_layers"] == 6
    assert written["rope_theta"] == 5000000
    assert written["rope_parameters"]["rope_theta"] == 5000000
    assert written["dflash_config"] == small_config()["dflash_config"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        TRAINING,
        {"rope_theta": None, "rope_scaling": {"rope_theta": 1e4, "type": "default"}},
        {"head_dim": None},
        {"dflash_query_causal": True},
        {"sliding_window_non_causal": True},
        {"output_multiplier": 0.3, "final_logit_softcapping": 5.0},
        {"input_embedding_scale": 1.7, "is_neox_style": False},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
        {"layer_types": None, "is_causal": True},
        {"dtype": None, "torch_dtype": "float32"},
    ],
    ids=lambda changes: "+".join(changes) or "published",
)
def test_the_written_config_reads_the_same_and_is_settled(changes):
    raw = small_config(**changes)
    once = published(raw, dtype="bfloat16")
    assert DFlash2Config.from_dict(once) == DFlash2Config.from_dict(raw)
    assert published(once, dtype="bfloat16") == once


def test_windows_named_only_in_dflash_config_are_spelled_out():
    nested = small_config()["dflash_config"] | {"use_swa": True, "swa_window_size": 12}
    raw = small_config(dflash_config=nested, layer_types=None, sliding_window=None)
    written = published(raw)
    assert written["layer_types"] == ["sliding_attention"] * 2
    assert written["sliding_window"] == 12
    assert DFlash2Config.from_dict(written) == DFlash2Config.from_dict(raw)
    assert published(written) == written


@pytest.mark.parametrize(
    "places, causal",
    [
        ({"dflash_query_causal": True}, True),
        ({"sliding_window_non_causal": True}, False),
        ({"is_causal": False}, False),
    ],
)
def test_causality_is_written_where_every_runtime_looks(places, causal):
    assert published(small_config(**places))["is_causal"] is causal


def test_causality_stays_unsaid_where_the_source_does_not_say_it():
    assert "is_causal" not in published(small_config())


def test_a_tap_count_in_dflash_config_gives_way_to_the_depth():
    nested = small_config()["dflash_config"] | {"num_target_layers": 2}
    raw = small_config(
        dflash_config=nested, num_target_layers=None, target_num_hidden_layers=6
    )
    written = published(raw)
    assert written["num_target_layers"] == 6
    assert written["dflash_config"]["num_target_layers"] == 6


@pytest.mark.parametrize("field", ["auto_map", "model_file"])
def test_fields_that_name_code_are_dropped_and_told(tmp_path, field):
    marker = tmp_path / "ran"
    named = {"AutoModel": "evil.Model"} if field == "auto_map" else "evil.py"
    source = write_drafter(tmp_path / "source", config=small_config(**{field: named}))
    (source / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Model: pass\n")
    for direction in (to_mlx, to_torch):
        report = direction(source, tmp_path / direction.__name__)
        assert field not in read_config(report.destination)
        assert not (report.destination / "evil.py").exists()
        assert any(field in note and "never run" in note for note in report.notes)
        assert any("evil.py" in note for note in report.notes)
    assert not marker.exists()


def test_dtype_is_true_to_the_tensors_written(tmp_path):
    wrong = small_config(dtype="float32", torch_dtype="float32")
    source = write_drafter(tmp_path / "source", config=wrong, dtype="bfloat16")
    to_mlx(source, tmp_path / "mlx")
    written = read_config(tmp_path / "mlx")
    assert (written["dtype"], written["torch_dtype"]) == ("bfloat16", "bfloat16")
    to_torch(source, tmp_path / "torch", dtype="float16")
    written = read_config(tmp_path / "torch")
    assert (written["dtype"], written["torch_dtype"]) == ("float16", "float16")


def test_quantization_is_written_only_where_it_holds():
    raw = small_config(quantization={"group_size": 64, "bits": 8})
    config = DFlash2Config.from_dict(raw)
    assert "quantization" not in published_config(raw, config)
    kept = published_config(raw, config, quantization=config.quantization)
    assert kept == raw
    new = {"group_size": 32, "bits": 4}
    written = published_config(raw, config, quantization=new)
    assert written["quantization"] == new
    again = dataclasses.replace(config, quantization=new)
    assert DFlash2Config.from_dict(written) == again


def test_a_copy_of_the_quantization_follows_it():
    quantization = {"group_size": 64, "bits": 8, "mode": "affine"}
    raw = small_config(quantization=quantization, quantization_config=quantization)
    config = DFlash2Config.from_dict(raw)
    assert published_config(raw, config, quantization=config.quantization) == raw
    plain = published_config(raw, config)
    assert not {"quantization", "quantization_config"} & plain.keys()
    new = {"group_size": 32, "bits": 4}
    written = published_config(raw, config, quantization=new)
    assert written["quantization_config"] == written["quantization"] == new


def test_a_setting_of_quantization_without_quantized_tensors_is_dropped(tmp_path):
    config = small_config(quantization={"group_size": 64, "bits": 8})
    source = write_drafter(tmp_path / "source", config=config)
    to_torch(source, tmp_path / "torch")
    assert "quantization" not in read_config(tmp_path / "torch")


def test_text_of_any_language_stays_readable(tmp_path):
    source = write_drafter(tmp_path / "source", config=small_config(title="起草模型"))
    to_mlx(source, tmp_path / "mlx")
    assert "起草模型" in (tmp_path / "mlx" / "config.json").read_text(encoding="utf-8")
