"""Record the wire format and check that the schema only appends to it.

    python test/serialization/history.py

writes the wire format of schema.fbs to history.json, the record. The script fails and writes
nothing if existing programs would have another meaning with schema.fbs.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from executorch_mlx.serialization import generate

RECORD = Path(__file__).with_name("history.json")


def wire(schema: generate.Schema) -> dict[str, dict]:
    """The wire format of a schema.

    Comments, attributes such as `output`, and the names of op tables are left out, because a program does not
    contain them. An entry of `ops` is a list: the tag, then the fields in the order of their ids.
    """
    op_tables = {table for _, table in schema.ops.values()}
    return {
        "root": {"root": schema.root},
        "structs": {name: _fields(members) for name, members in schema.structs.items()},
        "enums": schema.enums,
        "tables": {name: _fields(members) for name, members in schema.tables.items() if name not in op_tables},
        "ops": {op: [tag, *_fields(schema.tables[table])] for op, (tag, table) in schema.ops.items()},
    }


def _fields(members: list[generate.Member]) -> list[str]:
    """Return a line for each field, such as `decimals: int32 = 0`."""
    lines = []
    for m in members:
        if m.type in generate.INTS:
            default = str(int(m.default or 0)) if m.default != "null" else "null"
        elif m.type in ("float", "double"):
            default = str(float(m.default or 0)) if m.default != "null" else "null"
        elif m.type == "bool":
            default = m.default or "false"
        else:
            default = m.default
        line = f"{m.name}: {m.type}" + (f" = {default}" if default else "")
        lines.append(line + " (required)" * m.required)
    return lines


def violations(old: dict, schema: generate.Schema) -> list[str]:
    """List the changes of a recorded wire format that are not appends."""
    new = wire(schema)
    found = []
    for kind, entries in old.items():
        found += [f"{kind}: {name} is gone" for name in entries if name not in new[kind]]
        for name in entries.keys() & new[kind].keys():
            found += [f"{name}: {change}" for change in _changes(kind, entries[name], new[kind][name])]
    shared = Counter(table for _, table in schema.ops.values())
    for op, (_, table) in schema.ops.items():
        if shared[table] > 1 and op in old["ops"] and len(new["ops"][op]) > len(old["ops"][op]):
            found.append(f"{op}: table {table} is frozen, because {shared[table]} ops share it")
    return sorted(found) + _tag_violations(old["ops"], new["ops"])


def _changes(kind: str, old, new) -> list[str]:
    """List the changes of one entry that are not additions at its end."""
    if kind == "root":
        return [f"was {old}, is {new}"] * (old != new)
    if kind == "enums":
        kept = [(key, value, new.get(key)) for key, value in old.items()]
        added = [(key, value) for key, value in new.items() if key not in old]
        return [
            *(f"{key} was {was}, is {now}" for key, was, now in kept if was != now),
            *(f"{key} = {now} is not at the end" for key, now in added if now <= max(old.values())),
        ]
    kept = enumerate(zip(old, new))
    found = [f"{i}: was {was!r}, is {now!r}" for i, (was, now) in kept if was != now]
    found += [f"{line!r} is gone" for line in old[len(new) :]]
    added = new[len(old) :]
    if kind == "structs":
        return found + [f"{line!r} is added to a struct" for line in added]
    return found + [f"{line!r} is added as required" for line in added if "(required)" in line]


def _tag_violations(old: dict, new: dict) -> list[str]:
    first_extension = generate.FIRST_EXTENSION
    found = []
    for op in new.keys() - old.keys():
        tag = new[op][0]
        taken = {entry[0] for entry in old.values()}
        if tag >= first_extension:
            if tag in taken or tag > 255:
                found.append(f"{op}: tag {tag} is not a free tag from {first_extension} to 255")
        elif tag <= max(t for t in taken if t < first_extension):
            found.append(f"{op}: tag {tag} is not at the end of the union")
    for tag, count in Counter(entry[0] for entry in new.values()).items():
        if count > 1:
            found.append(f"tag {tag} is given to {count} ops")
    return sorted(found)


def dump(record: dict) -> str:
    """Format the record as JSON with one entry per line, so that a diff shows what was appended."""
    kinds = []
    for kind, entries in record.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        kinds.append(f'  "{kind}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def main() -> int:
    schema = generate.parse(generate.SCHEMA.read_text())
    if RECORD.exists():
        found = violations(json.loads(RECORD.read_text()), schema)
        if found:
            print(*found, sep="\n", file=sys.stderr)
            return 1
    RECORD.write_text(dump(wire(schema)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
