"""`export_speech` and the export command: checkpoints, quantization, and what they refuse."""

import pytest
import small_speech
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.llm.export import HeadConfig
from executorch_mlx.speech import SpeechModel
from executorch_mlx.speech.export import export_speech
from safetensors.torch import load_file, save_file
from small_speech import noise
from transformers import WhisperFeatureExtractor, WhisperProcessor


def test_the_export_command_recognises_a_checkpoint_and_quantizes_it(tmp_path, capsys):
    """A monolingual model with 24 mel bins, windows of 0.5 s, and fewer layers in the decoder than the encoder.

    A layer whose rows are no multiple of a group stays in full precision, and is named.
    """
    model = small_speech.whisper(multilingual=False, num_mel_bins=24, max_source_positions=25, encoder_ffn_dim=40)
    model.save_pretrained(tmp_path / "model")
    small_speech.tokenizer().save_pretrained(tmp_path / "model")
    WhisperFeatureExtractor(feature_size=24).save_pretrained(tmp_path / "model")
    file, folder = tmp_path / "model.pte", str(tmp_path / "model")
    assert main(["export", folder, "-o", str(file), "--quantize", "int8", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "methods      encode, forward" in printed and "speech_max_samples=8000" in printed
    assert "unquantized  " in printed and ".fc2" in printed.split("unquantized  ")[1].splitlines()[0]
    with SpeechModel(file) as speech:
        assert not speech.languages and not speech.tasks and speech.has_timestamps and speech.max_seconds == 0.5
        assert len(speech.generate(noise(8000), max_new_tokens=8).result().tokens) == 8
    assert main(["export", folder, "-o", str(file), "--batch", "2"]) == 1
    assert "--batch: " in capsys.readouterr().err
    assert main(["export", str(small_speech.DEMO), "-o", str(file), "--max-seconds", "5"]) == 1
    assert "--max-seconds: expected a speech model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "make, options, message",
    [
        ("whisper", {"feature_extractor": WhisperFeatureExtractor()}, "feature_size: got 80, expected 16"),
        ("whisper", {"max_context_len": 41}, "max_context_len: got 41, expected 2 to 40"),
        ("whisper", {"quantize": "mixed"}, "quantize: got mixed, expected"),
        ("whisper", {"head": HeadConfig(penalties=4)}, "head.penalties: got 4, expected 0"),
        ("moonshine", {"max_seconds": 0.01}, r"max_seconds: got 0.01, expected at least 0.080"),
        ("moonshine", {"max_seconds": 0.0}, "max_seconds: got 0.0, expected more than 0"),
        ("moonshine", {"group_size": 32}, "group_size: got 32 with none"),
    ],
)
def test_what_cannot_be_exported_is_refused(make, options, message):
    with pytest.raises(ValueError, match=f"^export_speech: .*{message}"):
        export_speech(getattr(small_speech, make)(), **options)


@pytest.mark.parametrize(
    "save",
    [
        lambda e, folder: e.save_pretrained(folder),
        lambda e, folder: WhisperProcessor(e, small_speech.tokenizer()).save_pretrained(folder),
    ],
)
def test_settings_of_the_checkpoint_are_checked(save, tmp_path):
    """A processor stores the settings of its feature extractor in a file of its own."""
    small_speech.whisper().save_pretrained(tmp_path)
    save(WhisperFeatureExtractor(feature_size=16, dither=0.5), tmp_path)
    with pytest.raises(ValueError, match="dither: got 0.5, expected 0.0"):
        export_speech(tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    """transformers would cast them without their scales."""
    small_speech.whisper().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.encoder.layers.0.fc1.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=f"export_speech: model: .*{name}: got F8_E4M3, but config.json has no quantization"
    ):
        export_speech(tmp_path)


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got another model, expected whisper, moonshine, moonshine_streaming"):
        export_speech(small_speech.DEMO)
    from transformers import WhisperForAudioClassification

    config = small_speech.whisper().config
    with torch.device("meta"):
        classifier = WhisperForAudioClassification(config)
    message = "got WhisperForAudioClassification, expected a model for conditional generation"
    with pytest.raises(ValueError, match=message):
        export_speech(classifier)
