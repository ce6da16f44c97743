"""setup_lambda.sh, the real script, in a temporary home folder, with fakes of all programs that use the network or the
system."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.isolation import REQUIRED

SCRIPT = Path(__file__).resolve().parents[2] / "setup_lambda.sh"
FONT = ".local/share/fonts/xkcd-script.ttf"
# The only real programs that the script may use. curl, wget, python3, fc-cache and uv are not among them.
REAL_PROGRAMS = ["bash", "sh", "cat", "chmod", "head", "mkdir", "mktemp", "mv", "od", "rm", "tr"]

INSTALL_UV = r"""mkdir -p "$HOME/.local/bin"
printf '#!/bin/sh\n' > "$HOME/.local/bin/uv"
chmod +x "$HOME/.local/bin/uv"
"""
# Shell code of fake downloads, chosen by the end of the address; `$1` is the address, `$2` the file.
SERVE_FONT = r"""printf '\000\001\000\000rest of the font' > "$2" """
SERVE_INSTALLER = f"cat > \"$2\" <<'END'\n{INSTALL_UV}END\n"
FAIL_HALFWAY = r"""printf '\000\001\000\000half' > "$2"; exit 28"""


class Machine:
    """A home folder, and a PATH with REAL_PROGRAMS and the fakes that a test adds."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin, self.log = folder / "home", folder / "bin", folder / "calls.log"
        self.temporary = folder / "tmp"
        for made in (self.home, self.bin, self.temporary):
            made.mkdir()
        self.log.touch()
        for program in REAL_PROGRAMS:
            found = shutil.which(program)
            assert found is not None, f"{program} is not installed"
            (self.bin / program).symlink_to(found)

    def fake(self, name: str, body: str = "") -> None:
        """Add a program that logs its call and then runs the shell code `body`."""
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.log}"\n{body}\n')
        path.chmod(0o755)

    def fake_download(self, name: str, *, font: str = SERVE_FONT, installer: str = SERVE_INSTALLER) -> None:
        """Add a fake curl or wget. The address is the argument that begins with https, and the file follows -o or
        -O."""
        self.fake(
            name,
            f"""
            while [ $# -gt 0 ]; do
                case "$1" in https://*) address="$1" ;; -o|-O) shift; file="$1" ;; esac
                shift
            done
            set -- "$address" "$file"
            case "$1" in
                *.ttf) {font} ;;
                *install.sh) {installer} ;;
                *) exit 22 ;;
            esac
            """,
        )

    def run(
        self, *arguments: str, environment: dict[str, str] | None = None, expect: int = 0
    ) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": str(self.bin), "HOME": str(self.home), "TMPDIR": str(self.temporary)}
        variables |= REQUIRED | (environment or {})
        command = [str(SCRIPT), *arguments]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        assert result.returncode == expect, result.stderr
        return result

    def calls(self, name: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.split()[0] == name]

    def leftovers(self) -> list[Path]:
        """Return files that a broken download has left behind."""
        fonts = self.home / ".local/share/fonts"
        return [*self.temporary.iterdir(), *(path for path in fonts.glob(".*") if path.name not in {".", ".."})]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready_machine(machine: Machine) -> Machine:
    """Machine with uv, curl and fc-cache."""
    machine.fake("uv")
    machine.fake("fc-cache")
    machine.fake_download("curl")
    return machine


def test_success(ready_machine: Machine) -> None:
    result = ready_machine.run()
    assert result.stderr == ""
    font = ready_machine.home / FONT
    assert font.read_bytes().endswith(b"rest of the font")
    assert font.stat().st_mode & 0o777 == 0o644
    (download,) = ready_machine.calls("curl")
    assert "ipython/xkcd-font" in download
    assert len(ready_machine.calls("fc-cache")) == 1
    assert ready_machine.leftovers() == []
    assert "PATH" not in result.stdout, "uv is on the PATH already"


def test_an_argument_installs_nothing(ready_machine: Machine) -> None:
    assert "without arguments" in ready_machine.run("--help", expect=2).stdout
    assert not ready_machine.calls("curl")


def test_a_second_run_downloads_nothing(ready_machine: Machine) -> None:
    ready_machine.run()
    before = (ready_machine.home / FONT).stat().st_mtime_ns
    ready_machine.log.write_text("")
    ready_machine.run()
    assert ready_machine.log.read_text() == ""
    assert (ready_machine.home / FONT).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "font",
    ["exit 6", FAIL_HALFWAY, ': > "$2"', """printf '<html>please sign in</html>' > "$2" """],
    ids=["no network", "broken off", "empty", "a sign-in page"],
)
def test_a_font_that_cannot_be_had_is_a_warning(ready_machine: Machine, font: str) -> None:
    ready_machine.fake_download("curl", font=font)
    result = ready_machine.run()
    assert result.stderr.startswith("warning: the xkcd font")
    assert not (ready_machine.home / FONT).exists()
    assert ready_machine.leftovers() == []
    assert ready_machine.calls("fc-cache") == []
    ready_machine.fake_download("curl")
    assert ready_machine.run().stderr == "", "the next run must try again"
    assert (ready_machine.home / FONT).exists()


def test_a_font_folder_that_cannot_be_made_is_a_warning(ready_machine: Machine) -> None:
    (ready_machine.home / ".local").write_text("a file")
    result = ready_machine.run()
    assert result.stdout.endswith("ready\n")
    assert result.stderr.startswith(f"warning: {ready_machine.home}/.local/share/fonts: cannot be written")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("fakes", "has_font", "words"),
    [
        ({}, False, "warning"),  # neither curl nor wget
        ({"curl": None}, True, ""),  # without fc-cache
        ({"curl": None, "fc-cache": "exit 1"}, True, "warning: fc-cache"),
        ({"curl": "exit 60", "wget": None}, True, ""),
    ],
)
def test_programs_that_a_machine_may_lack(
    machine: Machine, fakes: dict[str, str | None], has_font: bool, words: str
) -> None:
    machine.fake("uv")
    for name, body in fakes.items():
        machine.fake_download(name) if body is None else machine.fake(name, body)
    result = machine.run()
    assert words in result.stderr
    assert bool(result.stderr) == bool(words)
    assert (machine.home / FONT).exists() == has_font


@pytest.mark.parametrize(
    "variables", [{}, {"XDG_CACHE_HOME": "elsewhere"}, {"MPLCONFIGDIR": "elsewhere/matplotlib"}], ids=str
)
def test_matplotlib_forgets_its_font_list_when_a_font_is_new(ready_machine: Machine, variables: dict[str, str]) -> None:
    folder = ready_machine.home / ("elsewhere/matplotlib" if variables else ".cache/matplotlib")
    environment = {name: f"{ready_machine.home}/{place}" for name, place in variables.items()}
    folder.mkdir(parents=True)
    stale, other = folder / "fontlist-v390.json", folder / "tex.cache"
    stale.touch()
    other.touch()
    ready_machine.run(environment=environment)
    assert not stale.exists()
    assert other.exists()
    stale.touch()
    ready_machine.run(environment=environment)
    assert stale.exists(), "the list is kept if no font is new"


@pytest.mark.parametrize("folder", ["UV_INSTALL_DIR", "XDG_BIN_HOME", "XDG_DATA_HOME"])
def test_uv_is_found_where_its_installer_puts_it(machine: Machine, folder: str) -> None:
    uv = machine.home / ("there/bin/uv" if folder == "XDG_DATA_HOME" else "there/share/uv")
    uv.parent.mkdir(parents=True)
    (machine.home / "there" / "share").mkdir(exist_ok=True)
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    result = machine.run(environment={folder: f"{machine.home}/there/share"})
    assert "uv is installed: " in result.stdout, result.stderr
    assert not any("astral.sh" in call for call in machine.calls("curl"))


@pytest.mark.parametrize(("downloader", "curl"), [("curl", None), ("wget", None), ("wget", "exit 60")])
def test_a_missing_uv_is_installed(machine: Machine, downloader: str, curl: str | None) -> None:
    machine.fake_download(downloader)
    if curl:
        machine.fake("curl", curl)
    result = machine.run()
    assert result.stderr == ""
    assert any("https://astral.sh/uv/install.sh" in call for call in machine.calls(downloader))
    assert os.access(machine.home / ".local/bin/uv", os.X_OK)
    assert f'export PATH="{machine.home}/.local/bin:$PATH"' in result.stdout
    assert (machine.home / FONT).exists()
    assert machine.leftovers() == []
    machine.log.write_text("")
    again = machine.run()
    assert machine.log.read_text() == "", "uv is found although it is not on the PATH"
    assert "export PATH=" in again.stdout


@pytest.mark.parametrize("installer", ["exit 6", FAIL_HALFWAY, 'echo "exit 1" > "$2"'])
def test_pip_takes_over_when_the_installer_cannot_be_had(machine: Machine, installer: str) -> None:
    machine.fake_download("curl", installer=installer)
    machine.fake("python3", INSTALL_UV)
    result = machine.run()
    assert machine.calls("python3") == ["python3 -m pip install --user uv"]
    assert "export PATH=" in result.stdout
    assert machine.leftovers() == []


def test_pip_on_an_externally_managed_python(machine: Machine) -> None:
    machine.fake("python3", f'case "$*" in *--break-system-packages*) {INSTALL_UV} ;; *) exit 1 ;; esac')
    machine.run()
    assert len(machine.calls("python3")) == 2


def test_no_way_to_install_uv_is_an_error(machine: Machine) -> None:
    machine.fake("curl", "exit 6")
    assert "error: uv could not be installed" in machine.run(expect=1).stderr
    assert machine.leftovers() == []


def test_a_home_with_a_space_in_its_name(ready_machine: Machine) -> None:
    home = ready_machine.home.rename(ready_machine.home.with_name("my home"))
    assert ready_machine.run(environment={"HOME": str(home)}).stderr == ""
    assert (home / FONT).exists()


@pytest.mark.parametrize("home", [["-u", "HOME"], ["HOME="]])
def test_an_environment_without_home(home: list[str]) -> None:
    """Without HOME, as in a boot script, the home folder is that of the system's list of users."""
    beginning = SCRIPT.read_text().partition("FONT_URL=")[0]
    command = ["env", *home, "bash", "-c", f'{beginning}echo "$HOME"']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == pwd.getpwuid(os.getuid()).pw_dir


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    result = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
