"""Known vulnerabilities of what is installed, or a line that says why nobody knows."""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    words = [
        sys.executable,
        "-m",
        "pip_audit",
        "--local",
        "--progress-spinner",
        "off",
        "-f",
        "json",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    if "No module named pip_audit" in done.stderr:
        print("pip-audit is not installed: pip install pip-audit.")
        return 1
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(
            f"Nothing was audited: {(done.stderr.strip().splitlines() or ['no answer'])[-1]:.200}"
        )
        return 0
    audited = [item for item in packages if "skip_reason" not in item]
    if not audited:
        print(
            f"Nothing was audited: no list of vulnerabilities answers for {len(packages)} packages."
        )
        return 0
    for item in audited:
        for hole in item["vulns"]:
            fixed = ", ".join(hole["fix_versions"]) or "no version"
            print(f"{item['name']} {item['version']}: {hole['id']}, fixed in {fixed}")
    holes = sum(len(item["vulns"]) for item in audited)
    print(f"{len(audited)} of {len(packages)} packages audited, {holes} known vulnerabilities.")
    return 1 if holes else 0


if __name__ == "__main__":
    raise SystemExit(main())
