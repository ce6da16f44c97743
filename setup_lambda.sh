#!/usr/bin/env bash
# Prepare a fresh cloud machine (Ubuntu, root or not): uv, and the font the charts are drawn with.
# Safe to run again: what is there already is left alone, and nothing is downloaded twice.
set -euo pipefail

FONT_URL="https://github.com/ipython/xkcd-font/raw/master/xkcd-script/font/xkcd-script.ttf"
FONT_FILE="$HOME/.local/share/fonts/xkcd-script.ttf"
UV_INSTALLER_URL="https://astral.sh/uv/install.sh"

say() { printf '%s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# One temporary file at a time; whatever ends the script, it goes.
temporary=""
trap 'if [ -n "$temporary" ]; then rm -f "$temporary"; fi' EXIT

# fetch URL FILE: by curl, or else by wget; fails without a trace of a page that says "not found".
fetch() {
    if have curl && curl -fsSL --retry 2 --connect-timeout 15 --max-time 300 -o "$2" "$1"; then return 0; fi
    if have wget && wget -q --tries=3 --timeout=30 -O "$2" "$1"; then return 0; fi
    return 1
}

# Print where uv is, on the PATH or where installers put it.
find_uv() {
    local folder
    if command -v uv 2>/dev/null; then return 0; fi
    for folder in "${UV_INSTALL_DIR:-}" "${XDG_BIN_HOME:-}" "$HOME/.local/bin" "$HOME/.cargo/bin"; do
        if [ -n "$folder" ] && [ -x "$folder/uv" ]; then
            say "$folder/uv"
            return 0
        fi
    done
    return 1
}

# The official installer, downloaded whole before any of it runs.
install_uv_officially() {
    local status=0
    temporary="$(mktemp)"
    { fetch "$UV_INSTALLER_URL" "$temporary" && [ -s "$temporary" ] && sh "$temporary"; } || status=$?
    rm -f "$temporary"
    temporary=""
    return "$status"
}

# Ubuntu 24.04 and later refuse pip without --break-system-packages; with --user it breaks nothing of the system's.
install_uv_by_pip() {
    have python3 || return 1
    python3 -m pip install --user uv || python3 -m pip install --user --break-system-packages uv
}

setup_uv() {
    local uv
    if uv="$(find_uv)"; then
        say "uv is installed: $uv"
    else
        say "installing uv"
        install_uv_officially || install_uv_by_pip || true
        if ! uv="$(find_uv)"; then
            printf 'error: uv could not be installed; check the network, or install it by hand (%s)\n' \
                "https://docs.astral.sh/uv/" >&2
            exit 1
        fi
        say "uv is installed: $uv"
    fi
    if ! have uv; then
        say "uv is not on this shell's PATH; run this, or open a new shell:"
        say "    export PATH=\"${uv%/*}:\$PATH\""
    fi
}

# Whether a file begins as a TrueType or OpenType font does; a sign-in page of some network does not.
is_font() {
    case "$(head -c 4 "$1" | od -An -tx1 | tr -d ' \n')" in
        00010000 | 74727565 | 4f54544f) return 0 ;;
        *) return 1 ;;
    esac
}

# matplotlib remembers the fonts it once found and would not see a new one.
forget_matplotlib_fonts() {
    local folder
    for folder in "${MPLCONFIGDIR:-}" "${XDG_CACHE_HOME:-$HOME/.cache}/matplotlib"; do
        if [ -n "$folder" ]; then rm -f "$folder"/fontlist-*.json; fi
    done
}

setup_font() {
    if [ -s "$FONT_FILE" ]; then
        say "the xkcd font is installed: $FONT_FILE"
        return 0
    fi
    mkdir -p "${FONT_FILE%/*}"
    # Beside its destination, so that the move is one rename and never leaves half a font.
    temporary="$(mktemp "${FONT_FILE%/*}/.download.XXXXXX")"
    if ! fetch "$FONT_URL" "$temporary" || ! is_font "$temporary"; then
        rm -f "$temporary"
        temporary=""
        warn "the xkcd font could not be downloaded; charts will be drawn in matplotlib's own. Run this again to retry."
        return 0
    fi
    chmod 644 "$temporary"
    mv -f "$temporary" "$FONT_FILE"
    temporary=""
    if have fc-cache; then fc-cache -f "${FONT_FILE%/*}" || warn "fc-cache failed; the font may not be seen yet"; fi
    forget_matplotlib_fonts
    say "the xkcd font is installed: $FONT_FILE"
}

setup_uv
setup_font
say "ready"
