#!/usr/bin/env bash
# Every page of docs/ is in the site's navigation, once, and what is there is a page.   site_test.sh PROJECT
set -euo pipefail
cd "${1:?the project}"
config=scripts/documents/mkdocs.yml
pages() { (cd docs && find . -name '*.md' | sed 's:^\./::'); printf '%s\n' contributing.md changelog.md api.md; }
# scripts/site makes the last three.
if ! diff <(pages | sort) <(sed -n 's/^ *- .*: \([^ ]*\.md\)$/\1/p' "$config" | sort); then
  echo "docs/ (<) and the navigation of $config (>) have other pages" >&2
  exit 1
fi
