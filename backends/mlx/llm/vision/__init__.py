"""Pictures: decoding files of users, and what a checkpoint does with a picture before the model. Needs no torch.

prepare = Preprocessor(settings)
pixels = prepare(open_picture("cat.jpg"))  # float32 [3, H, W]
"""

from .picture import PictureError, open_picture
from .preprocess import Preprocessor, preprocessor_settings

__all__ = ["PictureError", "Preprocessor", "open_picture", "preprocessor_settings"]
