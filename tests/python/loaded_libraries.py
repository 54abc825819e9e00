# Appended to a program that has trained by libzero: rank 0 prints its last loss, and each rank checks which libraries it has loaded.
#   PROGRAM FOLDER_OF_LIBZERO FOLDER_OF_TORCH
import os
import sys

if libzero.group().rank == 0:
    print(f"step {step} loss {loss.item().hex()}")

with open("/proc/self/maps") as maps:
    loaded = {line[line.index("/") :].rstrip("\n") for line in maps if ".so" in line and "/" in line}


def folders_of(library):
    return {os.path.dirname(os.path.realpath(file)) for file in loaded if os.path.basename(file).startswith(library)}


libzero_folder, torch_folder = (os.path.realpath(folder) for folder in sys.argv[1:])
for library in ("libtorch_cpu.so", "libtorch_python.so", "libc10.so"):
    assert folders_of(library) == {torch_folder + "/lib"}, f"{library}: {folders_of(library)}"
for library in ("libzero.so", "_C.", "libfmt.so", "libhwy.so", "liburing.so", "libxxhash.so"):
    found = folders_of(library) - {torch_folder}  # torch has a _C too
    assert found == {libzero_folder}, f"{library}: {found}"
