"""Concept editing: the subspace (compared with scikit-learn's PCA), the removal of a concept, and the command."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA

from eval.cliplite.editing import alignment_table, concept_subspace, main, remove
from tests.evaluation import datasets


def paired_embeddings(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both sides ``(30, 16)`` of noisy pairs, and the direction ``(16,)`` in which both sides differ."""
    generator = torch.Generator().manual_seed(seed)
    direction = F.normalize(torch.randn(16, generator=generator), dim=0)
    common = 3 * torch.randn(30, 16, generator=generator)
    noise = 0.1 * torch.randn(30, 16, generator=generator)
    return common + direction + noise, common - direction - noise, direction


def test_subspace_is_the_pca_of_pairwise_centred_embeddings_and_removal_its_complement() -> None:
    first, second, direction = paired_embeddings()
    basis, explained = concept_subspace(first, second, components=3)
    middle = (first + second) / 2
    pca = PCA(3).fit(torch.cat([first - middle, second - middle]).double().numpy())
    agreement = (basis.double() @ torch.from_numpy(pca.components_).T).abs()
    torch.testing.assert_close(agreement, torch.eye(3, dtype=torch.float64), atol=1e-5, rtol=0)
    np.testing.assert_allclose(explained.numpy(), pca.explained_variance_ratio_, atol=1e-6)
    # The first basis vector is ``direction``, although the common part varies much more. It points to the first side.
    assert float(basis[0] @ direction) > 0.99
    features = torch.randn(50, 16)
    expected = torch.stack([h - sum((h @ v) * v for v in basis) for h in features])
    torch.testing.assert_close(remove(features, basis), expected)


def test_alignment_table_by_hand() -> None:
    first, second, _ = paired_embeddings()
    basis, _ = concept_subspace(first, second)
    generator = torch.Generator().manual_seed(1)
    queries, images = (
        {side: F.normalize(torch.randn(count, 16, generator=generator), dim=1) for side, count in counts}
        for counts in ([("a", 10), ("b", 10)], [("a", 120), ("b", 80)])
    )
    found = alignment_table(queries, images, basis, top=5)["a"]["b"]
    for name, features in (("original", images["b"]), ("neutral", remove(images["b"], basis))):
        best = [sorted((features @ query).tolist())[-5:] for query in queries["a"]]
        assert found[name] == pytest.approx(np.mean(best), abs=1e-6)
    assert found["delta"] == pytest.approx(found["original"] - found["neutral"])
    with pytest.raises(ValueError, match="group b has 80 images"):
        alignment_table(queries, images, basis, top=100)


def test_command(tmp_path: Path, model_arguments: list[str]) -> None:
    classes = datasets.write_class_folders(tmp_path, 40, lambda label: "odd" if label % 2 else "even")
    (tmp_path / "odd" / "broken.png").write_bytes(b"no image")
    (tmp_path / "pairs.csv").write_text("one, two\nthree,four\n\nfive, six\n")
    (tmp_path / "templates.txt").write_text("the number {c}\nI see a {c}\n")

    def run(*arguments: str) -> None:
        folders = ["--images", str(tmp_path / "odd"), str(tmp_path / "even")]
        main([*model_arguments, *folders, "--output-dir", str(tmp_path / "out"), *arguments])

    custom = ["--pairs", str(tmp_path / "pairs.csv"), "--templates", str(tmp_path / "templates.txt")]
    run(*custom, "--components", "2", "--top", "3")
    report = json.loads((tmp_path / "out" / "editing.json").read_text())
    assert report["images"] == Counter(classes) and (report["pairs"], report["templates"]) == (3, 2)
    basis = np.load(tmp_path / "out" / "subspace.npy")
    np.testing.assert_allclose(basis @ basis.T, np.eye(2), atol=1e-5)
    page = (tmp_path / "out" / "nearest.html").read_text()
    assert page.count("data:image/jpeg") == 6 * 4 * 5 and "the number three" in page and "odd, concept removed" in page
    cell = report["alignment"]["odd"]["even"]
    table = (tmp_path / "out" / "editing.md").read_text().splitlines()
    assert len(table) == 4 and f"{cell['original']:.4f}" in table[2] and table[2].startswith("| odd |")
    run("--names", "male", "female", "--top", "3")
    assert set(json.loads((tmp_path / "out" / "editing.json").read_text())["alignment"]) == {"male", "female"}
    with pytest.raises(ValueError, match="has lines that are not pairs"):
        run("--pairs", str(tmp_path / "templates.txt"))
