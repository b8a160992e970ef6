"""The features that the exported graph computes equal those of transformers."""

import pytest
import torch
from executorch_mlx.llm.speech.export.features import LogMel
from small_speech import noise
from transformers import WhisperFeatureExtractor


@pytest.mark.parametrize("options", [{}, {"feature_size": 128}, {"n_fft": 512, "hop_length": 200, "feature_size": 40}])
@pytest.mark.parametrize("count", [16_000, 9_000, 0])
def test_log_mel_equals_the_feature_extractor(options, count):
    extractor = WhisperFeatureExtractor(chunk_length=1, **options)
    samples = noise(count)
    expected = torch.as_tensor(extractor(samples, sampling_rate=16_000)["input_features"])
    padded = torch.zeros(1, 16_000)
    padded[0, :count] = torch.as_tensor(samples)
    torch.testing.assert_close(LogMel(extractor)(padded), expected, atol=2e-5, rtol=0)
