#!/bin/bash
python3 - << 'PY'
import struct
from collections import Counter
from pathlib import Path

data = Path("/app/frame.bin").read_bytes()
width, height, stride, offset = struct.unpack_from("<4H", data, 4)
starts = range(offset, offset + height * stride, stride)
counts = Counter(pixel for start in starts for pixel in data[start : start + width])
Path("/app/histogram.bin").write_bytes(struct.pack("<256I", *(counts[value] for value in range(256))))
PY
