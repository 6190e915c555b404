"""A bundle from its files to a machine: parts, damage, what an earlier part left, another system's tree."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.bundle import __main__ as command
from antiphon.benchmarks.bundle import install, make, wheels
from antiphon.benchmarks.bundle.figures import main as show_figures
from antiphon.benchmarks.bundle.manifest import Item, Manifest, sha256_of
from antiphon.benchmarks.bundle.wheels import BundleError, fetch, record_faults, without
from antiphon.benchmarks.records import Record, append_records

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], program: str = "") -> Path:
    """A wheel of some files, whose RECORD is right; ``program`` is the one that may be executed."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    contents = {**files, f"{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"}
    with zipfile.ZipFile(wheel, "w") as archive:
        rows = []
        for inside, text in contents.items():
            entry = zipfile.ZipInfo(inside)
            entry.external_attr = (0o100755 if inside == program else 0o100644) << 16
            archive.writestr(entry, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{inside},sha256={digest},{len(text)}")
        record = f"{name}-{version}.dist-info/RECORD"
        archive.writestr(record, "\n".join([*rows, f"{record},,"]) + "\n")
    return wheel


class Source:
    """What bundles are made of here: a few small wheels and one library."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "lock.txt").write_text("one==1.0\ntwo==2.0\ntorch==2.11\n")
        self.library = folder / "sums-0123.so"
        self.library.write_bytes(b"\x7fELF" + b"x" * 3000)
        monkeypatch.setattr(make, "LOCK", folder / "lock.txt")
        monkeypatch.setattr(make, "packages_of", lambda kind: {"one", "two"})
        monkeypatch.setattr(make, "LEFT_OUT", {"two": ("two/unused/",)})
        monkeypatch.setattr(make, "PYTHON", HERE)
        monkeypatch.setattr(make, "_libraries", self._libraries)
        monkeypatch.setattr(install, "NEEDED", ("json",))
        write_wheel(folder / "wheels", "one", "1.0", {"one.py": "SIZE = 1\n" + "#" * 4000})
        files = {
            "two/__init__.py": "",
            "two/unused/large.py": "#" * 100_000,
            "two/server": "#!/bin/sh\necho served\n",
            "two-2.0.data/platlib/two/native.py": "NATIVE = True\n",
            "two-2.0.data/scripts/two": "#!python\n",
        }
        write_wheel(folder / "wheels", "two", "2.0", files, program="two/server")

    def _libraries(self) -> list[tuple[Item, Path]]:
        return [(make._item("library", "sums", "", self.library), self.library)]

    def make(self, out: Path, part_mib: float = 1.0, kind: str = "kernels", **more: Any) -> Manifest:
        return make.make(kind, out, part_mib, cache=self.folder, **more)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    (tmp_path / "source").mkdir()
    return Source(tmp_path / "source", monkeypatch)


def set_up(bundle: Path, target: Path, *options: str) -> int:
    return install.main([str(bundle), "--into", str(target), *options])


def test_a_bundle_brings_packages_programs_and_libraries(source: Source, tmp_path: Path) -> None:
    bundle, target = tmp_path / "bundle", tmp_path / "target"
    manifest = source.make(bundle)
    assert manifest == Manifest.read(bundle)
    assert {item.name: item.version for item in manifest.items} == {"one": "1.0", "two": "2.0", "sums": ""}
    assert manifest.items[0].part == 1
    assert {item.left_out for item in manifest.items if item.name == "two"} == {("two/unused/",)}
    for item in manifest.items:
        file = bundle / f"part-{item.part}" / item.file
        assert (file.stat().st_size, sha256_of(file)) == (item.size_bytes, item.sha256)
    assert set_up(bundle, target, "--whole") == 0
    site = target / "site"
    assert (target / "kernels/sums-0123.so").read_bytes() == source.library.read_bytes()
    assert not (site / "two/unused").exists()
    assert not list(target.rglob("two-2.0.data"))
    code = "import one, two.native, importlib.metadata as m; "
    code += "print(one.SIZE, two.native.NATIVE, m.version('two'))"
    words = (
        f"source {target}/env.sh",
        f"{sys.executable} -c {shlex.quote(code)}",
        f"{site}/two/server",
        "env",
    )
    shown = " && ".join(words)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ANTIPHON")}
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("1 True 2.0\nserved\n")
    assert f"ANTIPHON_COMMIT={manifest.commit_of(make.ROOT)}\n" in done.stdout
    assert f"ANTIPHON_KERNEL_LIBRARY_DIR={target}/kernels\n" in done.stdout


def test_figures_say_when_the_code_is_not_the_bundles(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, bundle, target = tmp_path / "checkout", tmp_path / "bundle", tmp_path / "target"
    (checkout / "src/antiphon").mkdir(parents=True)
    (checkout / "kernels").mkdir()
    (checkout / "src/antiphon/kernels").symlink_to("../../kernels")
    (checkout / "kernels/sum.cu").write_text("first")
    monkeypatch.setattr(make, "ROOT", checkout)
    monkeypatch.setattr(install, "ROOT", checkout)
    monkeypatch.setattr(make, "checkout_commit", lambda: "abc")
    source.make(bundle)
    for code, commit in (("first", "abc"), ("second", "abc+changes"), ("first", "abc")):
        (checkout / "kernels/sum.cu").write_text(code)
        assert set_up(bundle, target) == 0
        assert f"ANTIPHON_COMMIT:-{commit}}}" in (target / "env.sh").read_text()


def test_parts_come_one_after_the_other(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, target = tmp_path / "bundle", tmp_path / "target"
    assert source.make(bundle, part_mib=5000 / 2**20).parts == 2
    second = (bundle / "part-2").rename(tmp_path / "later")
    assert set_up(bundle, target) == 0
    assert "part-2 of 2 is to come: " in capsys.readouterr().out
    assert set_up(bundle, target, "--whole") == 1
    for file in (bundle / "part-1").iterdir():
        file.unlink()
    second.rename(bundle / "part-2")
    assert set_up(bundle, target, "--whole") == 0
    assert "3 of 3 files" in capsys.readouterr().out
    assert (target / "kernels/sums-0123.so").exists()
    assert {"one.py", "two"} <= {path.name for path in (target / "site").iterdir()}


def test_another_version_takes_the_place_of_what_was_there(source: Source, tmp_path: Path) -> None:
    target = tmp_path / "target"
    source.make(tmp_path / "first")
    assert set_up(tmp_path / "first", target) == 0
    (source.folder / "lock.txt").write_text("one==1.1\ntwo==2.0\n")
    write_wheel(source.folder / "wheels", "one", "1.1", {"other.py": ""})
    source.make(tmp_path / "second")
    assert set_up(tmp_path / "second", target) == 0
    names = {path.name for path in (target / "site").iterdir()}
    assert {"other.py", "one-1.1.dist-info"} <= names
    assert "one.py" not in names
    assert not list((target / "site/one-1.0.dist-info").glob("*"))


def test_damage_another_machine_and_no_bundle_are_refused(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, target = tmp_path / "bundle", tmp_path / "target"
    source.make(bundle)
    file = next(bundle.glob("part-*/one-*.whl"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert set_up(bundle, target) == 1
    assert "one-1.0-py3-none-any.whl: damaged" in capsys.readouterr().err
    file.write_bytes(whole)
    assert set_up(bundle, target, "--whole") == 0
    with monkeypatch.context() as patched:
        patched.setattr(install, "NEEDED", ("torch", "no_such_package"))
        assert set_up(bundle, target) == 1
        assert "has no no_such_package, which no bundle brings" in capsys.readouterr().err
    document = json.loads((bundle / "manifest.json").read_text())
    for change, said in (({"python": "3.99"}, "is for Python 3.99"), ({"format": 9}, "format 9")):
        (bundle / "manifest.json").write_text(json.dumps(document | change))
        assert set_up(bundle, target) == 1
        assert said in capsys.readouterr().err
    (bundle / "manifest.json").write_text("{}")
    assert set_up(bundle, target) == 1
    assert "no manifest of a bundle" in capsys.readouterr().err


def test_a_wheel_writes_nowhere_else(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(source.folder / "wheels", "one", "1.0", {"../../escaped.py": ""})
    source.make(tmp_path / "bundle")
    assert set_up(tmp_path / "bundle", tmp_path / "target") == 1
    assert "escaped.py lies outside of it" in capsys.readouterr().err
    assert not list(tmp_path.rglob("escaped.py"))


def test_what_cannot_be_packed_is_named(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BundleError, match=r"one-1\.0-py3-none-any\.whl has 0\.0 MiB and a part at most 0\.001"
    ):
        source.make(tmp_path / "bundle", part_mib=0.001)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.txt").write_text("")
    with pytest.raises(BundleError, match="folder: is there, and is no bundle"):
        source.make(tmp_path / "folder")
    monkeypatch.setattr(make, "packages_of", lambda kind: {"three"})
    with pytest.raises(BundleError, match=r"lock\.txt has no version of three"):
        source.make(tmp_path / "bundle")
    with pytest.raises(BundleError, match="nowhere: no such tree of a peer"):
        source.make(tmp_path / "bundle", kind="peer", peer_tree=tmp_path / "nowhere")
    with pytest.raises(BundleError, match="folder: holds no site/, so it is no tree of a peer"):
        source.make(tmp_path / "bundle", kind="peer", peer_tree=tmp_path / "folder")


def test_only_what_is_not_there_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path, "one", "1.0", {})
    asked: list[list[str]] = []

    def pip(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(line)
        if "two==2.0" in line:
            write_wheel(tmp_path, "two", "2.0", {})
        failed = "three==3.0" in line
        return subprocess.CompletedProcess(line, int(failed), "", "ERROR: No matching distribution for three")

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    assert fetch({"one": "1.0", "two": "2.0"}, tmp_path).keys() == {"one", "two"}
    (line,) = asked
    assert "one==1.0" not in line
    assert line[line.index("--python-version") + 1] == "3.12"
    assert "--only-binary=:all:" in line
    assert "manylinux_2_28_x86_64" in line
    fetch({"one": "1.0", "two": "2.0"}, tmp_path)
    assert len(asked) == 1
    with pytest.raises(BundleError, match=r"wheels for Python 3\.12: .* three"):
        fetch({"three": "3.0"}, tmp_path)
    with pytest.raises(BundleError, match="no wheel of four"):
        fetch({"four": "4.0"}, tmp_path)


def test_a_smaller_wheel_keeps_its_record_right(tmp_path: Path) -> None:
    inner = "big/inside/small-1.dist-info/RECORD"
    files = {
        inner: "small.py,,\n",
        "big/unused/a.js": "x",
        "big/unused/b,c.js": "y",
        "big/__init__.py": "",
        "big/run": "#!/bin/sh\n",
    }
    wheel = write_wheel(tmp_path, "big", "1.0", files, program="big/run")
    slim = without(wheel, ("big/unused/",), tmp_path / "slim")
    assert slim.name == wheel.name
    assert record_faults(slim) == []
    with zipfile.ZipFile(slim) as archive:
        assert set(archive.namelist()) == {
            *(inner, "big/__init__.py", "big/run", "big-1.0.dist-info/METADATA", "big-1.0.dist-info/RECORD")
        }
        assert archive.getinfo("big/run").external_attr >> 16 & 0o111
    with pytest.raises(BundleError, match=r"big-1\.0-py3-none-any\.whl: has no big/gone/"):
        without(wheel, ("big/unused/", "big/gone/"), tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
    with zipfile.ZipFile(slim, "a") as archive:
        archive.writestr("big/added.py", "")
    assert record_faults(slim) == ["big/added.py: not listed"]


def peer_archive(path: Path, name: str = "site/vllm/__init__.py") -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for inside, text in ((name, b"WHO = 'the peer'\n"), ("cache/known.json", b"{}")):
            member = tarfile.TarInfo(inside)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return path


def test_a_peers_tree_travels_by_itself(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, target = tmp_path / "bundle", tmp_path / "target"
    tree = peer_archive(tmp_path / "peer.tar.xz")
    source.make(bundle, kind="peer", peer_tree=tree)
    assert not list(bundle.rglob("peer.tar.xz"))
    for _ in range(2):
        assert set_up(bundle, target, "--whole") == 0
        code = "import os, vllm; print(vllm.WHO, os.environ['VLLM_CACHE_ROOT'])"
        done = subprocess.run(
            [target / "peer-python", "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"the peer {target}/peer-")
    moved = tree.rename(tmp_path / "moved.tar.xz")
    assert set_up(bundle, target) == 1
    assert "the peer's tree is not here; PEER_TREE= says where" in capsys.readouterr().err
    monkeypatch.setenv("PEER_TREE", str(moved))
    assert set_up(bundle, target) == 0
    moved.write_bytes(b"other")
    assert set_up(bundle, target) == 1
    assert "damaged, or another tree" in capsys.readouterr().err
    monkeypatch.setenv("PEER_TREE", str(tmp_path / "source"))
    assert set_up(bundle, target) == 1
    assert "holds no site/" in capsys.readouterr().err


def test_the_command_says_what_it_made_or_why_not(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kernels", "--out", str(tmp_path / "b"), "--cache", str(source.folder), "--part-mib"]
    assert command.main([*words, "0.005"]) == 0
    said = capsys.readouterr().out
    assert "part-2: 2 files, 0.0 MiB" in said
    assert "one_gpu.sh at " in said
    assert (tmp_path / "b/one_gpu.sh").exists()
    assert command.main([*words, "0.001"]) == 1
    assert "and a part at most 0.001" in capsys.readouterr().err
    for wrong in (["kernels", "--peer-tree", "x"], ["peer"], ["nonsense"]):
        with pytest.raises(SystemExit):
            command.main([*wrong, "--out", str(tmp_path / "b")])


def test_figures_of_a_run_are_a_short_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record(batch: int, date: str) -> Record:
        more = {"batch": batch, "context": 8192, "floor": 0.5}
        return Record("decode_step", "gpt-oss-20b", "TP1", "H200", "c", date, 1.25, "ms", **more)  # type: ignore[arg-type]

    new = [record(batch, "2026-02-01T00:00:00+00:00") for batch in range(1, 70)]
    append_records(tmp_path / "engine.json", [record(128, "2026-01-01T00:00:00+00:00"), *new])
    (tmp_path / "split.json").write_text('[{"mix": "chat"}]')
    (tmp_path / "transfer.json").write_text('{"rows": []}')
    assert show_figures([str(tmp_path), "--since", "2026-01-31T12:00:00"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("decode_step, gpt-oss-20b, TP1, batch 1, context 8192 ")
    assert lines[0].endswith("1.250 ms  floor 0.500")
    assert lines[-1] == f"and 9 more in {tmp_path}"
    assert not [line for line in lines if "batch 128" in line]
