#!/usr/bin/env python3
"""The bill of materials of a program, SPDX 2.3 as JSON, by what it loads and what dpkg knows of that.

  sbom.py --program FILE --name sherd --version 0.3.0 [--compiled-in PACKAGE...] [--cuda VERSION] > sherd.spdx.json
  sbom.py --program FILE [--compiled-in PACKAGE...] --copyrights FOLDER     copies their copyright files instead

Shared libraries are those that the dynamic linker finds; --compiled-in names packages of headers that end up in the
program. Licences are those of each package's copyright file where that is machine-readable, else NOASSERTION with the
licences that it mentions. SOURCE_DATE_EPOCH is the time that it states, so that the same inputs give the same bytes.
"""
import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

# Debian's short names that SPDX calls otherwise; all else is a LicenseRef with the text of the copyright file.
SPDX_NAMES = {
    "expat": "MIT", "mit": "MIT", "apache-2.0": "Apache-2.0", "apache-2": "Apache-2.0", "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause", "boost-1.0": "BSL-1.0", "bsl-1.0": "BSL-1.0", "zlib": "Zlib", "isc": "ISC",
    "cc0-1.0": "CC0-1.0", "cc0": "CC0-1.0", "mpl-2.0": "MPL-2.0", "mpl-2": "MPL-2.0", "mpl-1.1": "MPL-1.1",
    "artistic": "Artistic-1.0",
    "unicode": "Unicode-DFS-2016", "gpl-1": "GPL-1.0-only", "gpl-2": "GPL-2.0-only", "gpl-2.0": "GPL-2.0-only",
    "gpl-2+": "GPL-2.0-or-later", "gpl-2.0+": "GPL-2.0-or-later", "gpl-3": "GPL-3.0-only", "gpl-3.0": "GPL-3.0-only",
    "gpl-3+": "GPL-3.0-or-later", "gpl-3.0+": "GPL-3.0-or-later", "lgpl-2": "LGPL-2.0-only",
    "lgpl-2+": "LGPL-2.0-or-later", "lgpl-2.1": "LGPL-2.1-only", "lgpl-2.1+": "LGPL-2.1-or-later",
    "lgpl-3": "LGPL-3.0-only", "lgpl-3+": "LGPL-3.0-or-later", "gfdl-1.3": "GFDL-1.3-only",
}


def fail(text):
    sys.exit(f"sbom: {text}")


def output_of(*words):
    result = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return result.stdout if result.returncode == 0 else ""


def loaded_libraries(program):
    """Paths of all shared libraries that the dynamic linker finds for a program."""
    text = output_of("ldd", program)
    missing = re.findall(r"^\s*(\S+) => not found", text, re.M)
    if missing:
        fail(f"{program} needs {', '.join(missing)}, which is not installed here")
    return sorted(set(re.findall(r"(/\S+) \(0x", text)))


def owner_of(path):
    """The package that a file belongs to; /lib and /usr/lib are one on a merged system, which dpkg does not know."""
    real = os.path.realpath(path)
    for name in (path, real, "/usr" + path, real.removeprefix("/usr")):
        owner = output_of("dpkg-query", "-S", name)
        if owner:
            return owner.split(": ")[0].split(",")[0]
    fail(f"no package has {path}: libraries that dpkg did not install cannot be listed")


def facts_of(package):
    form = "${Package}\t${Version}\t${source:Package}\t${source:Version}\t${Architecture}\t${Maintainer}\t${Homepage}"
    facts = output_of("dpkg-query", "-W", "-f", form, package).split("\t")
    if len(facts) != 7:
        fail(f"the package {package} is not installed here")
    return dict(zip(("name", "version", "source", "source_version", "architecture", "maintainer", "homepage"), facts))


def copyright_file(name):
    return f"/usr/share/doc/{name}/copyright"


def licences_of(name):
    """(SPDX expression, {LicenseRef: Debian's name}, comment) of a package's copyright file."""
    path = copyright_file(name)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return "NOASSERTION", {}, f"{path} is not there"
    if not re.match(r"\s*Format(-Specification)?:", text):
        common = sorted(set(re.findall(r"/usr/share/common-licenses/([\w.+-]*\w)", text)))
        mentioned = f"; it names {', '.join(common)}" if common else ""
        return "NOASSERTION", {}, f"the copyright file is no machine-readable one{mentioned}: {path}"
    terms, references = set(), {}
    for stanza in re.split(r"\n\s*\n", text):
        if not re.search(r"^Files:", stanza, re.M):
            continue
        # What the packaging itself is under is no part of the library.
        if re.search(r"^Files:\s*debian/\S*\s*$", stanza, re.M):
            continue
        found = re.search(r"^License:[ \t]*(.+)$", stanza, re.M)
        for clause in re.split(r",?\s+and\s+|,\s*", found.group(1).strip()) if found else []:
            choices = []
            for term in re.split(r"\s+or\s+|\s*\|\s*", clause):
                known = SPDX_NAMES.get(term.lower())
                if not known:
                    known = "LicenseRef-Debian-" + (re.sub(r"[^A-Za-z0-9.-]+", "-", term).strip("-") or "unnamed")
                    references[known] = term
                choices.append(known)
            terms.add(choices[0] if len(choices) == 1 else "(" + " OR ".join(choices) + ")")
    if not terms:
        return "NOASSERTION", {}, f"the copyright file names no licence: {path}"
    return " AND ".join(sorted(terms)), references, f"all licences of the source's files, from {path}"


def spdx_id(text):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]+", "-", text)


def package_entry(facts, how):
    expression, references, comment = licences_of(facts["name"])
    version = facts["version"].replace("+", "%2B").replace(":", "%3A")
    entry = {
        "SPDXID": spdx_id("Package-" + facts["name"]),
        "name": facts["name"],
        "versionInfo": facts["version"],
        "supplier": "Organization: Debian",
        "originator": "Person: " + facts["maintainer"],
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": expression,
        "licenseComments": comment,
        "copyrightText": "NOASSERTION",
        "sourceInfo": f"built by Debian from the source package {facts['source']} {facts['source_version']}",
        "comment": how,
        "externalRefs": [{
            "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
            "referenceLocator": f"pkg:deb/debian/{facts['name']}@{version}?arch={facts['architecture']}",
        }],
    }
    if facts["homepage"]:
        entry["homepage"] = facts["homepage"]
    return entry, references


def cuda_entry(version):
    return {
        "SPDXID": "SPDXRef-Package-cuda-runtime", "name": "CUDA runtime (static)", "versionInfo": version,
        "supplier": "Organization: NVIDIA Corporation", "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION", "licenseDeclared": "LicenseRef-NVIDIA-CUDA-EULA",
        "copyrightText": "NOASSERTION", "comment": "compiled in",
    }


def document(arguments):
    now = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", 0)), datetime.timezone.utc)
    root = {
        "SPDXID": "SPDXRef-Package-program", "name": arguments.name, "versionInfo": arguments.version,
        "supplier": "Organization: Sherd", "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
        "licenseConcluded": "Apache-2.0", "licenseDeclared": "Apache-2.0", "copyrightText": "NOASSERTION",
        "primaryPackagePurpose": "APPLICATION",
    }
    packages, references, relations = [root], {}, [("SPDXRef-DOCUMENT", "DESCRIBES", root["SPDXID"])]
    libraries = {}
    for path in loaded_libraries(arguments.program):
        libraries.setdefault(owner_of(path), []).append(os.path.basename(path))
    parts = [(package, "DYNAMIC_LINK", "loads " + ", ".join(sorted(names))) for package, names in libraries.items()]
    parts += [(package, "STATIC_LINK", "compiled in, from headers") for package in arguments.compiled_in]
    for package, relation, how in sorted(parts):
        entry, more = package_entry(facts_of(package), how)
        packages.append(entry)
        references.update(more)
        relations.append((root["SPDXID"], relation, entry["SPDXID"]))
    extracted = [{"licenseId": key, "name": name, "extractedText":
                  f"The licence that Debian's copyright file of the package calls {name}; its text stands there."}
                 for key, name in sorted(references.items())]
    if arguments.cuda:
        packages.append(cuda_entry(arguments.cuda))
        relations.append((root["SPDXID"], "STATIC_LINK", "SPDXRef-Package-cuda-runtime"))
        extracted.append({"licenseId": "LicenseRef-NVIDIA-CUDA-EULA", "name": "NVIDIA CUDA EULA",
                          "extractedText": "The end user licence agreement of the CUDA toolkit, Attachment A."})
    contents = {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{arguments.name}-{arguments.version}",
        "creationInfo": {"created": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": ["Tool: sherd-sbom"]},
        "packages": packages, "hasExtractedLicensingInfos": extracted,
        "relationships": [{"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b}
                          for a, kind, b in relations],
    }
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    contents["documentNamespace"] = f"urn:sherd:sbom:{arguments.name}-{arguments.version}:{digest[:32]}"
    return contents


def copy_copyrights(program, compiled_in, folder):
    """The copyright files, and the common licences that they name and that lie beside them on Debian alone."""
    common = os.path.join(folder, "common-licenses")
    os.makedirs(common, exist_ok=True)
    packages = {owner_of(path).split(":")[0] for path in loaded_libraries(program)}
    for name in sorted((packages - {"libc6"}) | set(compiled_in)):  # the C library stays with the system
        shutil.copyfile(copyright_file(name), os.path.join(folder, name))
        with open(copyright_file(name), encoding="utf-8", errors="replace") as file:
            for licence in re.findall(r"/usr/share/common-licenses/([\w.+-]*\w)", file.read()):
                if os.path.exists(f"/usr/share/common-licenses/{licence}"):
                    shutil.copyfile(f"/usr/share/common-licenses/{licence}", os.path.join(common, licence))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--name", default="sherd")
    parser.add_argument("--version", default="")
    parser.add_argument("--compiled-in", nargs="*", default=[])
    parser.add_argument("--cuda", default="")
    parser.add_argument("--copyrights")
    arguments = parser.parse_args()
    if arguments.copyrights:
        copy_copyrights(arguments.program, arguments.compiled_in, arguments.copyrights)
    else:
        json.dump(document(arguments), sys.stdout, indent=1, ensure_ascii=False)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
