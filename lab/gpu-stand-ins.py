"""Stand-ins for the GPU libraries that a wheel of PyTorch is linked to. Needs gcc and binutils.

    gpu-stand-ins.py TORCH_LIB_DIRECTORY [SONAME THAT IS REALLY THERE ...]

Comes in: the directory of torch's libraries. Goes out: one small library there for each that is missing, with the symbols and
symbol versions that torch asks for. What must hold: every function returns 1, an error in all these libraries' terms, so that a
call into a GPU fails instead of pretending to work.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
from collections import defaultdict

OWN = ("libtorch", "libc10", "libshm")
FOREIGN = re.compile(r"lib(cu|nv|nccl)")
FOREIGN_SYMBOL = re.compile(r"(cu|nv|nccl|__cu|__nv)")
DRIVER = "libcuda.so.1"  # opened at run time, and looked for in vain
# Libraries whose symbols carry a version that is not the library's name.
NAMED_VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: pathlib.Path):
    """Name, version, and whether it is defined here or only weakly wanted, of each dynamic symbol."""
    for line in output("readelf", "--dyn-syms", "--wide", str(library)).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            name, _, version = fields[7].partition("@")
            yield name, version.strip("@"), fields[6] != "UND", fields[4] == "WEAK"


def survey(libraries):
    """Which libraries are wanted, and which symbols of which version; a wanted symbol without a version may be anyone's."""
    wanted, defined, loose = set(), set(), set()
    symbols = defaultdict(set)
    for library in libraries:
        wanted.update(re.findall(r"NEEDED\s+(\S+)", output("objdump", "-p", str(library))))
        for name, version, here, weak in dynamic_symbols(library):
            if here:
                defined.add(name)
            elif version.startswith("lib") or version in NAMED_VERSIONS:
                symbols[version].add(name)
            elif not version and not weak and FOREIGN_SYMBOL.match(name):
                loose.add(name)
    return wanted, symbols, loose - defined


def build(directory: pathlib.Path, soname: str, version: str, names, loose) -> None:
    with tempfile.TemporaryDirectory() as work:
        source, script = pathlib.Path(work, "stand_in.c"), pathlib.Path(work, "versions")
        functions = "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names | loose))
        source.write_text(functions or "int stand_in;\n")
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{soname}", str(source)]
        if names:
            script.write_text(f"{version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, "-o", str(directory / soname)], check=True)


def main(directory: pathlib.Path, present: set) -> None:
    libraries = [path for path in directory.glob("*.so*") if path.name.startswith(OWN)]
    wanted, symbols, loose = survey(libraries)
    missing = sorted(name for name in wanted if FOREIGN.match(name) and name not in present | {DRIVER})
    versions = {soname: soname for soname in missing} | {soname: v for v, soname in NAMED_VERSIONS.items()}
    for soname in missing:
        build(directory, soname, versions[soname], symbols[versions[soname]], loose)
        loose = set()  # once is enough
    print(f"{len(missing)} stand-ins in {directory.name}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), set(sys.argv[2:]))
