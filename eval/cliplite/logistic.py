"""Multinomial logistic regression for as many images as ImageNet has.

scikit-learn's own, on torch tensors (from 1.9), holds about six arrays of the size of all logits at a time: 1 GB more than
the features for 40,000 images of 1,000 classes, so 33 GB for ImageNet. Here the logits exist for 65,536 images at a time.
"""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

# Images whose logits exist at a time: 256 MiB for ImageNet's 1,000 classes.
_ROWS = 2**16


class TorchLogisticRegression:
    """scikit-learn's ``LogisticRegression`` on a torch device, in float32.

    It minimizes the same function, the mean cross entropy plus ``|W|^2 / (2 C n)`` with a free intercept, with L-BFGS,
    until the largest entry of the gradient is below ``tolerance``. The features lie on the device.

    Args:
        cost: scikit-learn's C, the inverse of the weight decay.
        max_iterations: of L-BFGS.
        device: where to compute.
        tolerance: scikit-learn's ``tol``.
    """

    def __init__(self, cost: float, max_iterations: int, device: str | torch.device, tolerance: float = 1e-4):
        self.cost = cost
        self.max_iterations = max_iterations
        self.device = torch.device(device)
        self.tolerance = tolerance

    def fit(self, features: np.ndarray, labels: np.ndarray) -> "TorchLogisticRegression":
        """Train on features ``(n, d)`` and labels ``(n,)``; every class must occur."""
        images = torch.as_tensor(features, dtype=torch.float32, device=self.device)
        targets = torch.as_tensor(labels, dtype=torch.int64, device=self.device)
        self._linear = nn.Linear(images.shape[1], int(targets.max()) + 1, device=self.device)
        nn.init.zeros_(self._linear.weight)
        nn.init.zeros_(self._linear.bias)
        optimizer = torch.optim.LBFGS(
            self._linear.parameters(),
            max_iter=self.max_iterations,
            max_eval=4 * self.max_iterations,
            tolerance_grad=self.tolerance,
            history_size=10,  # as SciPy's
            line_search_fn="strong_wolfe",
        )
        optimizer.step(lambda: self._objective(images, targets))
        steepest = max(float(p.grad.abs().max()) for p in self._linear.parameters() if p.grad is not None)
        iterations = optimizer.state[self._linear.weight]["n_iter"]
        if iterations >= self.max_iterations and steepest > self.tolerance:
            warnings.warn(
                f"L-BFGS stopped after {iterations} iterations with a gradient of {steepest:.1e}; "
                f"raise --max-iterations.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _objective(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the value, and put its gradient into the parameters' ``grad``."""
        self._linear.zero_grad()
        decay = self._linear.weight.square().sum() / (2 * self.cost * len(images))
        decay.backward()
        value = decay.detach().double()
        for rows, labels in zip(images.split(_ROWS), targets.split(_ROWS), strict=True):
            part = F.cross_entropy(self._linear(rows), labels, reduction="sum") / len(images)
            part.backward()
            value += part.detach()
        return value

    @torch.no_grad()
    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return class numbers ``(n,)`` for features ``(n, d)``."""
        chunks = [self._linear(rows.to(self.device)).argmax(dim=1) for rows in torch.as_tensor(features).split(_ROWS)]
        return torch.cat(chunks).cpu().numpy()

    def score(self, features: np.ndarray, labels: np.ndarray) -> float:
        """Return the accuracy."""
        return float(np.mean(self.predict(features) == labels))
