"""What is installed, what an import costs, and what no file may say."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = {"convert", "bench"}  # at the top here, inside mlx_dflash2 once installed


def packages_of(root):
    """Dotted names of the packages whose folders hold Python."""
    folders = {
        path.parent.relative_to(root)
        for top in ("mlx_dflash2", *ROOMS)
        for path in (root / top).rglob("*.py")
    }
    dotted = {".".join(folder.parts) for folder in folders}
    return {
        f"mlx_dflash2.{name}" if name.split(".")[0] in ROOMS else name
        for name in dotted
    }


def test_every_folder_with_python_is_packaged():
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_of(ROOT)


def test_every_package_is_marked_as_one():
    for name in packages_of(ROOT):
        folder = name.replace(".", "/")
        room = folder.removeprefix("mlx_dflash2/")
        at = ROOT / (room if room.split("/")[0] in ROOMS else folder)
        assert (at / "__init__.py").is_file(), at


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of what git would ship, built without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in shipped_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    code = (
        "import sys\nfrom setuptools.build_meta import build_wheel\n"
        "print(build_wheel(sys.argv[1]))"
    )
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def shipped_files():
    """Paths of the repository's files, build leftovers aside."""
    tops = ["mlx_dflash2", *ROOMS, "tests", "docs", ".ci", ".github"]
    paths = [path for top in tops for path in (ROOT / top).rglob("*")]
    paths += ROOT.glob("*.*")
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in {*paths, ROOT / "LICENSE"}
        if path.is_file() and not {"__pycache__", ".git"} & set(path.parts)
    )


def test_the_wheel_installs_one_import_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mlx_dflash2", "mlx_dflash2-0.1.0.dist-info"}
    packaged = {
        str(Path(name).parent).replace("/", ".")
        for name in names
        if name.endswith(".py")
    }
    assert packaged == packages_of(ROOT)


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in shipped_files():
        top = file.split("/")[0]
        shipped = file.endswith((".py", ".jsonl", ".toml")) or "/demo_drafter/" in file
        if shipped and (top == "mlx_dflash2" or top in ROOMS):
            assert (f"mlx_dflash2/{file}" if top in ROOMS else file) in names


def test_the_wheel_names_its_dependencies_by_platform(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read("mlx_dflash2-0.1.0.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert 'mlx>=0.32.2; sys_platform == "darwin"' in required
    assert 'mlx[cpu]>=0.32.2; sys_platform == "linux"' in required
    torch = [line for line in required if line.startswith("torch")]
    assert torch and all('extra == "torch"' in line for line in torch)
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    scripts = archive.read("mlx_dflash2-0.1.0.dist-info/entry_points.txt").decode()
    assert "mlx-dflash2 = mlx_dflash2.cli:main" in scripts


def test_one_version_everywhere(wheel):
    import mlx_dflash2

    version = mlx_dflash2.__version__
    assert wheel.name.startswith(f"mlx_dflash2-{version}-")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{version}]" in changes


HEAVY = ("mlx", "mlx_lm", "torch", "transformers", "huggingface_hub", "numpy")


@pytest.mark.parametrize("module", ["mlx_dflash2", "mlx_dflash2.cli"])
def test_importing_needs_no_backend(module):
    assert loaded_by(f"import {module}", HEAVY) == []


@pytest.mark.parametrize(
    "module",
    [
        *("config", "errors", "stats", "names", "checkpoint", "pairs", "conversations"),
        *("families", "families.dflash", "families.dflash2", "families.dspark"),
    ],
)
def test_what_both_backends_share_imports_neither(module):
    assert loaded_by(f"import mlx_dflash2.{module}", HEAVY) == []


def test_the_torch_room_imports_no_mlx():
    pytest.importorskip("torch")
    modules = sorted(
        f"mlx_dflash2.torch.{path.stem}"
        for path in (ROOT / "mlx_dflash2/torch").glob("*.py")
        if path.stem != "__init__"
    )
    assert loaded_by(f"import {', '.join(modules)}", ("mlx", "mlx_lm")) == []


def test_the_mlx_side_imports_no_torch_room():
    code = "import mlx_dflash2.generation, mlx_dflash2.loading"
    assert loaded_by(code, ("mlx_dflash2.torch",)) == []


def loaded_by(code, names):
    """Which of `names` are loaded after `code` ran in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [name for name in names if name in done.stdout.split()]


def test_public_names_exist_and_are_no_modules():
    import mlx_dflash2

    for name in mlx_dflash2.__all__:
        assert not (ROOT / "mlx_dflash2" / f"{name}.py").exists()
        assert getattr(mlx_dflash2, name).__module__.startswith("mlx_dflash2.")


# Paths of one machine, and marks of unfinished work. Spelled in parts so that this
# file may be searched too.
UNWANTED = [
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.])/work" r"/",
        r"/home" r"/\w",
        r"/Users" r"/\w",
        r"(?<![\w.])/tmp" r"/",
        r"\.\./" r"shared",
        r"\bTO" r"DO\b",
        r"\bFIX" r"ME\b",
        r"\bXX" r"X\b",
        r"NotImplemented" r"Error",
    )
]


@pytest.mark.parametrize("pattern", UNWANTED, ids=lambda pattern: pattern.pattern)
def test_no_file_holds_a_machine_path_or_an_unfinished_mark(pattern):
    found = []
    for name in shipped_files():
        if name.endswith(".safetensors"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


def test_the_readme_names_the_test_command_that_runs_here():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^python -m pytest$", readme, re.M)
    assert "python -m pytest\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")
