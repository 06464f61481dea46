"""The functions of ``compat.py``, which access OpenCLIP's internals."""

import argparse

import open_clip
import open_clip_train.distributed
import pytest
import torch

from openclip_ext import compat
from openclip_ext.model_configs import add_model_configs


def test_another_openclip_is_refused_by_version(monkeypatch):
    monkeypatch.setattr(open_clip, "__version__", "4.0.0")
    with pytest.raises(ImportError, match=r">=3\.3,<4, found 4\.0\.0"):
        compat.check_version()


def test_embedding_width_of_all_kinds_of_configurations():
    add_model_configs()
    assert compat.embedding_dim("RN50") == 1024
    assert compat.embedding_dim("ViT-B-32") == 512
    for name in ("demo-vit", "demo-resnet"):
        model = open_clip.create_model(name)
        assert compat.embedding_dim("hf-hub:somebody/model", model) == 64  # no request to the hub
    custom = open_clip.create_model("demo-vit", force_custom_text=True)
    assert compat.embedding_dim("hf-hub:somebody/model", custom) == 64
    with pytest.raises(ValueError, match="unknown embedding dimension"):
        compat.embedding_dim("no-such-model")


@pytest.mark.parametrize(("name", "width"), [("resnet18-2layers", 512), ("resnet50-6layers", 2048)])
def test_clip_lites_image_towers_end_with_their_pooled_features(name, width):
    add_model_configs()
    model = open_clip.create_model(name)
    assert not list(model.visual.head.parameters()) and model.text_projection.shape == (768, width)
    assert len(model.transformer.resblocks) == int(name.split("-")[1][0])
    images = torch.rand(1, 3, 224, 224)
    pooled = model.visual.trunk.forward_features(images).mean(dim=(2, 3))
    assert torch.allclose(model.encode_image(images), pooled, atol=1e-5) and compat.embedding_dim(name) == width


@pytest.mark.parametrize(("given", "current"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_gpu_is_current_and_has_a_number(given, current, monkeypatch):
    """``torch.cuda.set_device`` requires a device number. In a single process, OpenCLIP returns a device without a number."""
    chosen = []
    monkeypatch.setattr(open_clip_train.distributed, "init_distributed_device", lambda args: torch.device(args.device))
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append)
    assert compat.init_device(argparse.Namespace(device=given)) == torch.device(current)
    assert chosen == [torch.device(current).index]
