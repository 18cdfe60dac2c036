"""Reads AMD code objects (ELF): a listing with labels, and the compiler's own counts of registers and spills."""

import ctypes
import re
import struct
import sys
from pathlib import Path

import msgpack

TARGET = b"gfx950"
_AMDGPU_METADATA = 32  # note type NT_AMDGPU_METADATA


def _sections(code: bytes):
    """(name, type, bytes) of each section of a 64-bit ELF file."""
    start = struct.unpack_from("<Q", code, 40)[0]
    size, count, names = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, length, *_ in headers:
        end = code.index(b"\0", strings + name)
        yield code[strings + name : end].decode(), kind, code[offset : offset + length]


def metadata(code: bytes) -> dict[str, int]:
    """Metadata of the code object's only kernel, e.g. ``{".vgpr_count": 118, ...}``."""
    for _, kind, note in _sections(code):
        if kind != 7:  # SHT_NOTE
            continue
        name_size, size, note_type = struct.unpack_from("<III", note)
        if note_type == _AMDGPU_METADATA:
            start = 12 + (name_size + 3 & ~3)
            [kernel] = msgpack.unpackb(note[start : start + size], strict_map_key=False)["amdhsa.kernels"]
            return {key: value for key, value in kernel.items() if isinstance(value, int)}
    raise ValueError("no AMDGPU metadata in this code object")


def _disassembler() -> tuple[ctypes.CDLL, int]:
    """The libLLVM that the PyPI package llvm-nanobind ships, and a disassembler for ``TARGET``."""
    [library] = Path(sys.prefix).glob("lib/python3.*/site-packages/llvm_nanobind.libs/libLLVM-*.so*")
    llvm = ctypes.CDLL(str(library))
    for part in ("TargetInfo", "Target", "TargetMC", "Disassembler"):
        getattr(llvm, f"LLVMInitializeAMDGPU{part}")()
    llvm.LLVMCreateDisasmCPU.restype = ctypes.c_void_p
    llvm.LLVMDisasmInstruction.restype = ctypes.c_size_t
    llvm.LLVMDisasmInstruction.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    handle = llvm.LLVMCreateDisasmCPU(b"amdgcn-amd-amdhsa", TARGET, None, 0, None, None)
    assert handle, "this libLLVM does not know the target"
    return llvm, handle


def listing(code: bytes) -> str:
    """An AMDGCN listing of the kernel: a line an instruction, labels where branches lead."""
    llvm, handle = _disassembler()
    text = next(data for name, _, data in _sections(code) if name == ".text")
    buffer, line = ctypes.create_string_buffer(text, len(text)), ctypes.create_string_buffer(512)
    lines, targets, at = {}, {}, 0
    while at < len(text):
        size = llvm.LLVMDisasmInstruction(handle, ctypes.addressof(buffer) + at, len(text) - at, at, line, 512)
        assert size, f"unknown instruction at byte {at}"
        lines[at] = line.value.decode().strip()
        if jump := re.match(r"(s_c?branch\w*)\s+(-?\w+)$", lines[at]):
            words = int(jump[2], 0)
            targets[at] = at + 4 + 4 * (words - 65536 if words >= 32768 else words)
        at += size
    out = ["kernel:"]
    for at, instruction in lines.items():
        if at in targets.values():
            out.append(f".LBB0_{at:x}:")
        if at in targets:
            instruction = f"{instruction.split()[0]} .LBB0_{targets[at]:x}"
        out.append(f"\t{instruction}")
    return "\n".join(out)
