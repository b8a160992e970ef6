"""ExecuTorch's own training: a joint graph of forward and backward pass, its `TrainingModule` and its optimizer."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from torch.export.experimental import _export_forward_backward

CLASSES = 4


class Loss(torch.nn.Module):
    """Returns the loss and the most likely classes, as ExecuTorch's examples do."""

    def __init__(self, model):
        super().__init__()
        self.model, self.loss = model, torch.nn.CrossEntropyLoss()

    def forward(self, x, targets):
        logits = self.model(x)
        return self.loss(logits, targets), logits.detach().argmax(1)


def perceptron():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, CLASSES)
    )


def convolutions():
    parts = torch.nn.Unflatten(1, (1, 6, 6)), torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    return torch.nn.Sequential(*parts, torch.nn.Flatten(), torch.nn.Linear(16, CLASSES))


@pytest.mark.parametrize("make, features", [(perceptron, 3), (convolutions, 36)])
def test_the_training_module_of_executorch_equals_eager_torch(make, features):
    from executorch.extension.training import _load_for_executorch_for_training_from_buffer, get_sgd_optimizer

    torch.manual_seed(0)
    module, batch = Loss(make()), (torch.randn(5, features), torch.randint(0, CLASSES, (5,)))
    partitioner = MLXPartitioner()
    joint = _export_forward_backward(torch.export.export(module, batch))
    lowered = to_edge_transform_and_lower(joint, partitioner=[partitioner])
    assert not partitioner.explain().refused
    program = lowered.to_executorch().buffer  # the module does not copy it
    training = _load_for_executorch_for_training_from_buffer(program)
    expected = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    optimizer = None
    for _ in range(6):
        loss, classes = training.forward_backward("forward", batch)
        optimizer = optimizer or get_sgd_optimizer(training.named_parameters(), 0.3, 0.5, 0, 0, False)
        optimizer.step(training.named_gradients())
        expected.zero_grad()
        expected_loss, expected_classes = module(*batch)
        expected_loss.backward()
        expected.step()
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-4)
        assert torch.equal(classes, expected_classes)
    assert training.named_parameters().keys() == dict(module.named_parameters()).keys()
