"""Random JSON schemas, and random values that often follow them."""

import random

NAMES = ("a", "b", "c", "k y", "é")  # in the order that objects have them
SCALARS = (None, True, False, 0, 1, -3, 17, 2.5, -0.25, "", "a", "ab", "é", "x y", 'q"')
PATTERNS = ("^[a-c]{1,3}$", "^a", "b$", "[0-9]", "^(foo|bar)?$", "^x_")


def random_schema(rng: random.Random, depth: int = 3) -> dict:
    makers = [_number, _string, _listed, _types]
    if depth > 0:
        makers += [_array, _array, _object, _object, _combined]
    return rng.choice(makers)(rng, depth)


def _number(rng: random.Random, depth: int) -> dict:
    bounds = {}
    if rng.random() < 0.5:
        bounds[rng.choice(["minimum", "exclusiveMinimum"])] = rng.choice([-5, 0, 1, 3, -100, 2.125])
    if rng.random() < 0.5:
        bounds[rng.choice(["maximum", "exclusiveMaximum"])] = rng.choice([4, 20, 99, 1000, 9.75])
    return {"type": rng.choice(["integer", "number"])} | bounds


def _string(rng: random.Random, depth: int) -> dict:
    limits = {"minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    return {"type": "string"} | rng.choice([{}, limits, {"pattern": rng.choice(PATTERNS)}])


def _listed(rng: random.Random, depth: int) -> dict:
    return rng.choice([{"const": rng.choice(SCALARS)}, {"enum": rng.sample(SCALARS, 3)}])


def _types(rng: random.Random, depth: int) -> dict:
    some = rng.sample(["string", "integer", "null", "boolean", "array", "object"], 2)
    return rng.choice([{}, {"type": some}, {"minLength": 2}, {"minimum": 3}, {"maxItems": 2}, {"required": ["a"]}])


def _array(rng: random.Random, depth: int) -> dict:
    schema = {"type": "array"}
    if rng.random() < 0.7:
        schema["items"] = random_schema(rng, depth - 1)
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth - 1)]
    if rng.random() < 0.5:
        schema |= {"minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4)}
    return schema


def _object(rng: random.Random, depth: int) -> dict:
    names = sorted(rng.sample(NAMES, rng.randint(0, 3)), key=NAMES.index)
    schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    schema["required"] = names[: rng.randint(0, len(names))]
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, True, random_schema(rng, depth - 1)])
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^x_": random_schema(rng, depth - 1)}
    return schema


def _combined(rng: random.Random, depth: int) -> dict:
    parts = [random_schema(rng, depth - 1) for _ in range(2)]
    defined = {"$defs": {"d": parts[0]}, "type": "array", "items": {"$ref": "#/$defs/d"}}
    return rng.choice([{"anyOf": parts}, {"allOf": parts}, defined if depth == 3 else {"anyOf": parts}])


def random_value(rng: random.Random, depth: int = 2):
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return rng.choice([rng.choice(SCALARS), rng.randint(-20, 120), rng.choice(["foo", "x_", "abc", "a1b", "bb"])])
    if kind < 0.75:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    names = sorted(rng.sample(NAMES, rng.randint(0, 3)), key=NAMES.index)
    return {name: random_value(rng, depth - 1) for name in names}
