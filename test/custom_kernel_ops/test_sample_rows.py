"""Sampling with parameters by row: each row draws the token that it draws in a batch of its own."""

import pytest
import torch
from executorch_mlx.custom_kernel_ops.logits_processors import bias_logits, penalize_logits
from executorch_mlx.custom_kernel_ops.sample import sample
from executorch_mlx.llm.sampling_head import sample_logits
from loaded_method import LoadedMethod
from sampling_logits import logits_of
from sampling_programs import DTYPES, Sample, lower

NAMES = ("temperature", "top_p", "seed", "top_k", "min_p")
# The parameters of eight rows: greedy, without filters, top-p, top-k, min-p, all filters, filters at off values, and a
# temperature of NaN, which is greedy.
VALUES = {
    "temperature": [0.0, 0.8, 1.0, 1.3, 0.7, 1.0, 2.0, torch.nan],
    "top_p": [0.5, 1.0, 0.9, 1.0, 1.0, 0.95, 1.0, 0.9],
    "seed": [1, 2, 2, 2**62, -5, 7, 8, 9],
    "top_k": [3, 0, 0, 40, 0, 50, 10**9, 40],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.1, 0.02, -1.0, 0.0],
}
ROWS = len(VALUES["seed"])
KINDS = ("text", "flat", "ties")


def parameters(advance=0):
    """Return the parameters of all rows, with `advance` added to the seeds."""
    values = {n: torch.tensor(VALUES[n], dtype=DTYPES[n]) for n in NAMES}
    return values | {"seed": values["seed"] + advance}


def alone(logits, values):
    """Return the token of each row, drawn in a batch of its own."""
    return torch.cat(
        [
            sample(logits[i : i + 1], **{n: v[i] if v.dim() else v for n, v in values.items()})
            for i in range(len(logits))
        ]
    )


@pytest.fixture(scope="module", params=[300, 20000])
def vocabulary(request):
    return request.param


@pytest.fixture(scope="module", params=["portable", "replaced", "node"])
def program(vocabulary, request):
    """A function that runs a program for 1 to ROWS rows, with all parameters by row."""
    batch = torch.export.Dim("batch", min=1, max=ROWS)
    shapes = {"logits": {0: batch}, "values": ({0: batch},) * len(NAMES)}
    values = tuple(parameters().values())
    lowered = lower(Sample(NAMES), (torch.zeros(ROWS, vocabulary), *values), request.param, dynamic_shapes=shapes)
    method = LoadedMethod(lowered.buffer)
    return lambda logits, values: method.execute([logits, *values.values()])[0].clone()


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_draws_what_it_draws_alone(program, vocabulary, kind):
    for seed in range(4):
        logits, values = logits_of(kind, ROWS, vocabulary, seed), parameters(seed)
        expected = alone(logits, values)
        assert sample(logits, **values).equal(expected)
        assert program(logits, values).equal(expected)


def test_any_number_of_rows(program, vocabulary):
    logits, values = logits_of("text", ROWS, vocabulary), parameters()
    expected = alone(logits, values)
    for count in range(1, ROWS + 1):
        drawn = program(logits[:count].clone(), {n: v[:count].clone() for n, v in values.items()})
        assert drawn.equal(expected[:count]), count


def test_order_of_the_rows_does_not_matter(program, vocabulary):
    logits, values = logits_of("flat", ROWS, vocabulary), parameters()
    order = torch.randperm(ROWS)
    drawn = program(logits[order].contiguous(), {n: v[order].contiguous() for n, v in values.items()})
    assert drawn.equal(alone(logits, values)[order])


@pytest.mark.parametrize("shared", NAMES)
def test_one_parameter_for_all_rows(vocabulary, shared):
    values = parameters()
    values[shared] = values[shared][5]
    logits = logits_of("text", ROWS, vocabulary)
    assert sample(logits, **values).equal(alone(logits, values))


def test_parameters_of_one_element_apply_to_all_rows():
    """The rows share one seed. For token v, row b uses the word [b, v] of the random bits."""
    logits = logits_of("text", ROWS, 300)
    ones = [torch.full(shape, 1.0) for shape in ((), (1,))]
    one, many = (sample(logits, x, x, torch.full(x.shape, 3)) for x in ones)
    assert one.equal(many)
    noise = torch.ops.mlx.random_bits([ROWS, 300], torch.tensor(3)).float() / 2**32
    assert one.equal((logits - torch.log(-torch.log(noise.clamp(max=1 - 2**-24)))).argmax(-1))


@pytest.mark.parametrize("how", ["eager", "node"])
def test_rows_without_a_seed_draw_independently(how):
    logits, ones = logits_of("flat", 1, 300).expand(ROWS, -1).contiguous(), torch.ones(ROWS)
    model = Sample(("temperature", "top_p"))
    if how == "node":
        drawn = LoadedMethod(lower(model, (logits, ones, ones), how).buffer).execute([logits, ones, ones])[0]
    else:
        drawn = model(logits, ones, ones)
    assert drawn.unique().numel() > ROWS / 2


@pytest.mark.parametrize("name", NAMES)
def test_wrong_number_of_rows_raises(name):
    values = parameters()
    values[name] = values[name][:3]
    with pytest.raises(ValueError, match=rf"mlx::sample: {name}: .*of shape \[3\], .* or of shape \[8\]"):
        sample(logits_of("text", ROWS, 300), **values)
    with pytest.raises(ValueError, match=rf"SamplingHead: {name}: got shape \[3\], expected one element or \[8\]"):
        sample_logits(logits_of("text", ROWS, 300), **values)


# Penalties and bias ----------------------------------------------------------------------


def adjustments():
    """Return the arguments of penalize_logits and those of bias_logits, for ROWS rows."""
    g = torch.Generator().manual_seed(1)
    history = torch.randint(-2, 60, (ROWS, 12), generator=g)
    return dict(
        history=history,
        valid=history % 5 != 0,
        repetition=torch.rand(ROWS, generator=g) * 2,
        presence=torch.randn(ROWS, generator=g),
        frequency=torch.randn(ROWS, generator=g),
    ), dict(tokens=torch.randint(-2, 60, (ROWS, 5), generator=g), values=torch.randn(ROWS, 5, generator=g))


class Adjust(torch.nn.Module):
    def forward(self, logits, penalties, bias):
        return bias_logits(penalize_logits(logits, *penalties), *bias)


def test_each_row_is_adjusted_as_in_a_batch_of_its_own():
    logits, (penalties, bias) = logits_of("text", ROWS, 50), adjustments()
    together = Adjust()(logits, penalties.values(), bias.values())
    for i in range(ROWS):
        own = [x[i : i + 1] if x.dim() == 2 else x[i] for x in penalties.values()]
        one = Adjust()(logits[i : i + 1], own, [x[i] for x in bias.values()])
        assert together[i : i + 1].equal(one), i
    inputs = (logits, tuple(penalties.values()), tuple(bias.values()))
    outputs = LoadedMethod(lower(Adjust(), inputs).buffer).execute([logits, *penalties.values(), *bias.values()])
    assert outputs[0].equal(together)
