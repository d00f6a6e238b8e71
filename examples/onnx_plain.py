"""An exported model without calmatch and torch: `python onnx_plain.py model.onnx PICTURE ...`.

Needs onnxruntime, numpy and Pillow. Pictures may have any size: the file resizes them itself.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])

for file in sys.argv[2:]:
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    pixels = np.asarray(image).transpose(2, 0, 1)[None]  # uint8 [1, 3, H, W]
    probabilities, members, sure = session.run(None, {"images": pixels})
    best = int(probabilities[0].argmax())
    names = [classes[k] for k in np.flatnonzero(members[0])]
    print(
        json.dumps(
            {
                "file": file,
                "label": classes[best],
                "confidence": round(float(probabilities[0, best]), 4),
                "set": names,
                "sure": bool(sure[0]),
            }
        )
    )
