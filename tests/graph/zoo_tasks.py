"""Tiny Hugging Face models for every task of transformers' auto-model mappings, each with a batch that it takes.

Configs are shrunk as in zoo_models. What a model is fed follows from the arguments of its forward: token ids with
padding, pictures, sound, labels as its task has them. Where several shapes are possible the first that runs is taken.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import zoo_models as zoo

# Task -> the name of transformers' mapping, without MODEL_FOR_ and _MAPPING_NAMES.
TASKS = {
    "masked-lm": "MASKED_LM",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "multiple-choice": "MULTIPLE_CHOICE",
    "text-encoding": "TEXT_ENCODING",
    "image-classification": "IMAGE_CLASSIFICATION",
    "semantic-segmentation": "SEMANTIC_SEGMENTATION",
    "universal-segmentation": "UNIVERSAL_SEGMENTATION",
    "object-detection": "OBJECT_DETECTION",
    "depth-estimation": "DEPTH_ESTIMATION",
    "masked-image-modeling": "MASKED_IMAGE_MODELING",
    "video-classification": "VIDEO_CLASSIFICATION",
    "zero-shot-image-classification": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "image-text-to-text": "IMAGE_TEXT_TO_TEXT",
    "ctc": "CTC",
    "speech-seq2seq": "SPEECH_SEQ_2_SEQ",
    "audio-classification": "AUDIO_CLASSIFICATION",
    "text-to-waveform": "TEXT_TO_WAVEFORM",
    "time-series": "TIME_SERIES_PREDICTION",
}  # fmt: skip
LENGTH, PADDED, SHORT = 37, 5, 11
PIXELS = 64
WORDS = 100  # ids of words are below, those of pictures and sound above
# Sizes of vision and audio models that text models have not.
ALSO_SMALL = {"out_hidden_size": 64, "output_dim": 64}
# What one architecture needs beyond what zoo_models says.
_RESNET = {
    "use_timm_backbone": False, "backbone": None,
    "backbone_config": ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1],
                                   "out_features": ["stage2", "stage3", "stage4"]}),
}  # fmt: skip
_ONE_TILE = {"image_grid_pinpoints": [[PIXELS, PIXELS]]}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_HALF_SECTIONS = {"rope_parameters": _SECTIONS["rope_parameters"] | {
    "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
}}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 120},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "deformable_detr": _RESNET,
    "detr": _RESNET,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "esm": {"vocab_size": zoo.VOCAB, "pad_token_id": 1, "mask_token_id": 2},
    "glmasr": {"audio_config": {"intermediate_size": 256}},
    "glm46v": {"text_config": _SECTIONS, "vision_config": {"out_hidden_size": 64}},
    "glm4v": {"text_config": _SECTIONS},
    "glm4v_moe": {"text_config": _HALF_SECTIONS},
    "glm_ocr": {"text_config": _SECTIONS},
    "hiera": {"embed_dim": 16, "depths": [1, 1, 2, 1]},
    "kosmos-2": {"text_config": {"embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 96}},
    "kosmos-2.5": {"text_config": {"embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 96}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        },
    },
    "llava_next": _ONE_TILE,
    "llava_next_video": _ONE_TILE,
    "llava_onevision": _ONE_TILE,
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "qwen2_5_vl": {"text_config": _SECTIONS},
    "qwen2_vl": {"text_config": _SECTIONS, "vision_config": {"embed_dim": 64}},
    "table-transformer": _RESNET,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "voxtral": {"audio_token_id": 121, "audio_config": {"intermediate_size": 256}},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2, "num_cross_attention_heads": 4},
    "reformer": zoo.OVERRIDES["reformer"]
    | {
        "is_decoder": False,
        "local_attn_chunk_length": LENGTH,
        "lsh_attn_chunk_length": LENGTH,
        "axial_pos_shape": (LENGTH, 1),
    },
}
# Masks drawn by numpy while the model runs: off, as dropout is, so that two runs are alike.
ALIKE = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False}


def model_types(task: str) -> dict[str, str]:
    """Model type -> class name, one entry for each distinct class of the task."""
    if task == "causal-lm":
        return zoo.model_types()
    from transformers.models.auto import modeling_auto

    chosen: dict[str, str] = {}
    for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES").items():
        name = names if isinstance(names, str) else names[0]
        if name not in chosen.values():
            chosen[model_type] = name
    return chosen


def tiny_model(task: str, model_type: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The class of that task and type with random weights in training mode, and a batch that it takes.

    A model that cannot be fed with pictures and patches of small sizes keeps its own.
    """
    if task == "causal-lm":
        model = zoo.tiny_model(model_type)
        return model, next(batches(task, model_type, model))
    import transformers

    model_class = getattr(transformers, model_types(task)[model_type])
    failed: list[str] = []
    for sizes in ({"image_size": PIXELS}, {"image_size": None}, {"image_size": None, "patch_size": None}):
        try:
            model = _built(model_class, model_type, sizes)
            return model, first_batch(task, model_type, model)
        except ImportError:
            raise
        except Exception as error:  # whatever a config or a model raises on sizes that are not its own
            failed.append(str(error))
    raise LookupError(failed[0])


def _built(model_class: Any, model_type: str, sizes: dict[str, Any]) -> torch.nn.Module:
    kept = dict(zoo.SMALL)
    zoo.SMALL.update(ALSO_SMALL | {name: size for name, size in sizes.items() if size})
    for name in [name for name, size in sizes.items() if not size]:
        del zoo.SMALL[name]
    try:
        config = zoo.shrunk(model_class.config_class, zoo.OVERRIDES.get(model_type, {}) | OVERRIDES.get(model_type, {}))
    finally:
        zoo.SMALL.clear()
        zoo.SMALL.update(kept)
    for name, value in {name: value for name, value in ALIKE.items() if hasattr(config, name)}.items():
        setattr(config, name, value)
    for name, value in (("decoder_start_token_id", 0), ("vocab_size", zoo.VOCAB)):  # what a head has to be told
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    _fit_special_tokens(config)
    torch.manual_seed(0)
    return model_class._from_config(config).train()


def _fit_special_tokens(config: Any) -> None:
    """Give ids of special tokens that are past the small vocabulary ones of its last, the same name the same id."""
    parts = [config, *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)]
    fields = [name for part in parts for name in vars(part) if name.endswith(("_token_id", "_token_index"))]
    ids = {name: zoo.VOCAB - 1 - i for i, name in enumerate(sorted(set(fields)))}
    for part in parts:
        for name, value in list(vars(part).items()):
            if name in ids and isinstance(value, int) and value >= WORDS:
                setattr(part, name, ids[name])


def batches(task: str, model_type: str, model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Batches that the model may take, the likeliest first."""
    if task == "causal-lm":
        ids = _tokens(2, LENGTH)
        yield zoo.example_inputs(model_type, model) or {"input_ids": ids, "labels": ids}
        return
    takes = set(inspect.signature(model.forward).parameters)
    for pixels in _pictures(model, takes) if "pixel_values" in takes else _videos(model, takes):
        for sound in _sounds(model, takes):
            for words in _words(task, model, takes, pixels, sound):
                batch = pixels | sound | words
                for labels in _labels(task, model, takes, batch):
                    yield batch | labels


def _tokens(*shape: int, seed: int = 0, top: int = zoo.VOCAB) -> torch.Tensor:
    return torch.randint(min(3, top - 1), top, shape, generator=torch.Generator().manual_seed(seed))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _pictures(model: Any, takes: set[str]) -> Iterator[dict[str, Any]]:
    """A picture for each row: as it is, as several crops, as rows of patches."""
    config = model.config
    names = ("vision_config", "encoder", "backbone_config")
    vision = next((c for name in names if (c := getattr(config, name, None))), config)
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or PIXELS
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _first_of(vision, ("num_channels", "in_channels", "in_chans"), 3)
    patch, merge = getattr(vision, "patch_size", 8), getattr(vision, "spatial_merge_size", 2)
    found: list[dict[str, Any]] = []
    for crops in ((), (1,), (getattr(vision, "num_frames", 2),)):
        found.append({
            "pixel_values": _noise(2, *crops, channels, height, width),
            "image_sizes": torch.tensor([[height, width]] * 2),
            "pixel_attention_mask": torch.ones(2, *crops, height, width, dtype=torch.long),
        })  # fmt: skip
        found.append({"pixel_values": found[-1]["pixel_values"]})
    if isinstance(patch, int):
        grid = torch.tensor([[1, 2 * merge, 4 * merge]] * 2)
        for columns in (channels * patch**2, channels * patch**2 * getattr(vision, "temporal_patch_size", 2)):
            flat = _noise(2 * 8 * merge**2, columns)
            found.append({"pixel_values": flat, "image_grid_thw": grid, "grid_thw": grid})
        both = {"spatial_shapes": grid[:, 1:], "pixel_attention_mask": torch.ones(2, 8 * merge**2, dtype=torch.long)}
        found.append({"pixel_values": _noise(2, 8 * merge**2, channels * patch**2), **both})
    if "grid_thw" in takes or "image_grid_thw" in takes or "spatial_shapes" in takes:
        found.reverse()
    for pictures in found:
        yield {name: value for name, value in pictures.items() if name in takes}


def _videos(model: Any, takes: set[str]) -> Iterator[dict[str, Any]]:
    if "pixel_values_videos" in takes:
        vision = getattr(model.config, "vision_config", model.config)
        size, frames = _first_of(vision, ("image_size", "crop_size"), PIXELS), _first_of(vision, ("num_frames",), 2)
        yield {"pixel_values_videos": _noise(2, frames, 3, size, size)}
    else:
        yield {}


def _first_of(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _sounds(model: Any, takes: set[str]) -> Iterator[dict[str, Any]]:
    if "input_values" in takes:
        yield {"input_values": _noise(2, 3200)}
        yield {
            "input_values": _noise(
                2, getattr(model.config, "max_length", 64) or 64, getattr(model.config, "num_mel_bins", 80) or 80
            )
        }
    elif "input_features" in takes:
        audio = (
            getattr(model.config, "audio_config", None) or getattr(model.config, "encoder_config", None) or model.config
        )
        bins = next(
            (
                v
                for name in (
                    "num_mel_bins",
                    "feature_size",
                    "feature_projection_input_dim",
                    "input_feat_per_channel",
                    "input_dim",
                )
                if (v := getattr(audio, name, None))
            ),
            80,
        )
        for length in (2 * getattr(audio, "max_source_positions", 64), 128):
            masks = {name: torch.ones(2, length, dtype=torch.long) for name in
                     ("input_features_mask", "feature_attention_mask") if name in takes}  # fmt: skip
            yield {"input_features": _noise(2, bins, length), **masks}
            yield {"input_features": _noise(2, length, bins), **masks}
            yield {"input_features": _noise(2, length, bins), "attention_mask": torch.ones(2, length, dtype=torch.long)}
    else:
        yield {}


def _words(
    task: str, model: Any, takes: set[str], pixels: dict[str, Any], sound: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Token ids, the last ones of the last row padding; with tokens of pictures and sound where these have some."""
    if "input_ids" not in takes:
        yield {}
        return
    shape = (2, 3, LENGTH) if task == "multiple-choice" else (2, LENGTH)
    top = min(v for c in (model.config.get_text_config(), model.config) if (v := getattr(c, "vocab_size", zoo.VOCAB)))
    ids = _tokens(*shape, top=min(top, WORDS))
    image = _first_of(model.config, ("image_token_id", "image_token_index", "media_token_id"))
    if task == "sequence-classification" and isinstance(end := getattr(model.config, "eos_token_id", None), int):
        ids[:, -PADDED - 1] = end  # BART and T5 look for it
    audio = _first_of(model.config, ("audio_token_id", "audio_token_index"))
    for token, inputs, getter in ((image, pixels, "get_image_features"), (audio, sound, "get_audio_features")):
        count = _tokens_for(model, inputs, getter) if inputs and token is not None else 0
        if count:
            ids = torch.cat([ids[:, :1], torch.full((2, count), token), ids[:, 1:]], 1)
    mask = torch.ones_like(ids)
    mask[-1, ..., -PADDED:] = 0
    kinds = {"mm_token_type_ids": (ids == image).long()} if "mm_token_type_ids" in takes and image is not None else {}
    kinds |= {"token_type_ids": (ids == image).long()} if model.config.model_type in ("gemma3", "paligemma") else {}
    if "attention_mask" in takes:
        yield {"input_ids": ids, "attention_mask": mask, **kinds}
    yield {"input_ids": ids, **kinds}


def _tokens_for(model: Any, inputs: dict[str, Any], getter: str) -> int:
    """How many tokens stand for one picture or sound of the two; 0 where the model does not say."""
    take = next((f for m in (model, getattr(model, "model", None)) if (f := getattr(m, getter, None))), None)
    if take is None:
        return 0
    try:
        with torch.no_grad():
            found = take(**inputs)
    except Exception:  # these are not of its shape, as the forward will say
        return 0
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts if part is not None) // 2


def _labels(task: str, model: Any, takes: set[str], batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Labels as the task has them; none where the loss is not the model's, or needs other libraries."""
    classes = getattr(model.config, "num_labels", 2) or 2
    ids = batch.get("input_ids")
    if task == "question-answering" and "start_positions" in takes:
        yield {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([5, 8])}
    elif task == "zero-shot-image-classification" and "return_loss" in takes:
        yield {"return_loss": True}
    elif task == "masked-image-modeling" and "bool_masked_pos" in takes:
        for count in (16, 64, 256, 4):
            yield {"bool_masked_pos": (torch.arange(2 * count) % 3 == 0).view(2, count)}
    elif "labels" in takes:
        if task == "masked-lm" and ids is not None:
            yield {"labels": torch.where(torch.arange(LENGTH) % 3 == 0, ids, -100)}
        elif task in ("seq2seq-lm", "speech-seq2seq", "image-text-to-text"):
            if task != "speech-seq2seq" and ids is not None:
                yield {"labels": ids}
            yield {"labels": _tokens(2, SHORT, seed=1)}
        elif task in ("sequence-classification", "image-classification", "audio-classification", "multiple-choice",
                      "video-classification"):  # fmt: skip
            yield {"labels": torch.tensor([0, 1])}
        elif task == "token-classification":
            yield {"labels": _tokens(2, LENGTH, seed=1, top=classes)}
        elif task == "ctc":
            yield {"labels": _tokens(2, 5, seed=1, top=30)}
        elif task == "semantic-segmentation":
            yield {"labels": _tokens(2, *batch["pixel_values"].shape[-2:], seed=1, top=classes)}
    yield {}


def loss_of(out: Any) -> torch.Tensor:
    """The model's own loss, else a number that every floating point tensor of the outputs has a part in."""
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss.mean()
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    read = [leaf.float() for leaf in leaves if leaf.requires_grad and leaf.numel()]
    return torch.stack([(leaf * _noise(*leaf.shape)).sum() / leaf.numel() ** 0.5 for leaf in read]).sum()


def first_batch(task: str, model_type: str, model: torch.nn.Module) -> dict[str, Any]:
    """The first batch with which the model gives a finite loss; what was wrong with the others, where all were."""
    reasons: dict[str, str] = {}
    for batch in batches(task, model_type, model):
        try:
            loss = loss_of(model(**batch))
        except Exception as error:  # whatever a forward raises on inputs that are not its own
            reasons.setdefault(_short(error), ", ".join(batch))
            continue
        if loss.isfinite() and loss.requires_grad:
            return batch
        reasons.setdefault(f"a loss of {float(loss)}", ", ".join(batch))
    raise LookupError("; ".join(f"{reason} ({names})" for reason, names in list(reasons.items())[:4]))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
