"""What two peers must share before raw page bytes may move between them."""

import dataclasses
import json

from k2i_jax.layout import HEAD_DIM, PAGE_SIZE, PageLayout

_SCALE_ORDER = {
    PageLayout.PAGE64: "group, key % 16, key // 16",
    PageLayout.PAGE8: "key // 8, group, key % 8",
    PageLayout.FUSED: "key, group",
}

_MEANING = {  # what an unequal fact does to raw pages, and what to do
    "layout": "the same number of bytes means other keys and dims, so scores are scrambled without any fault; convert "
    "one side's pages with k2i_jax.repack (lossless) or start both servers with the same page-8 switch",
    "page_size": "a page id names other slots; re-page one side before pages move",
    "scale_order": "each key would take another key's scales; it follows the layout, so the same repack mends it",
    "head_dim": "a key has another number of bytes; these are different models",
    "recipe": "pages stay readable, since bytes decode alike, but keys written by the two peers round differently; "
    "compare dequantised values, not bytes",
    "ratio": "a key stands for another number of positions; these are pools of different layers",
}


@dataclasses.dataclass(frozen=True)
class LayoutTag:
    """The facts that a transfer of raw pages relies on; None stands for a fact that is not known.

    Attributes:
      layout: a ``PageLayout`` value, e.g. "page8".
      page_size: keys a page.
      scale_order: order of the scale bytes inside a page.
      head_dim: dims a key.
      recipe: an ``FP4Recipe`` label, e.g. "sglang".
      ratio: positions a key stands for (1 or 2 in DeepSeek-V4.1).
    """

    layout: str | None = None
    page_size: int | None = None
    scale_order: str | None = None
    head_dim: int | None = None
    recipe: str | None = None
    ratio: int | None = None

    @classmethod
    def of(cls, layout: PageLayout, recipe: str | None = None, ratio: int | None = None) -> "LayoutTag":
        """The tag of a plane in ``layout``."""
        return cls(str(layout), PAGE_SIZE, _SCALE_ORDER[layout], HEAD_DIM, recipe, ratio)

    def check(self, other: "LayoutTag") -> tuple[str, ...]:
        """Compares with a peer's tag.

        Returns:
          Names of the facts that one side or both do not know, so that nobody compared them.

        Raises:
          TypeError: ``other`` is no ``LayoutTag``.
          ValueError: known facts differ; every one is named with both values.
        """
        if not isinstance(other, LayoutTag):
            raise TypeError(f"other: expected a k2i_jax.LayoutTag, got {type(other).__name__}")
        unknown, unequal = [], []
        for field in dataclasses.fields(self):
            here, there = getattr(self, field.name), getattr(other, field.name)
            if here is None or there is None:
                unknown.append(field.name)
            elif here != there:
                unequal.append(f"{field.name}: {here} here, {there} there")
        if unequal:
            hint = f" (not compared, unknown: {', '.join(unknown)})" if unknown else ""
            cure = "; k2i_jax.repack converts between layouts losslessly" if self.layout != other.layout else ""
            raise ValueError(f"other: the peers' planes differ: {'; '.join(unequal)}{hint}{cure}")
        return tuple(unknown)

    def explain(self, other: "LayoutTag") -> list[str]:
        """A comparison in words: one line for each fact that differs, with what it does and what to do; then one
        line for each that nobody could compare. Empty if all are known and equal.
        """
        unequal, unknown = [], []
        for field in dataclasses.fields(self):
            here, there = getattr(self, field.name), getattr(other, field.name)
            if here is None or there is None:
                unknown.append(f"{field.name}: not compared, {here or 'unknown'} here, {there or 'unknown'} there")
            elif here != there:
                unequal.append(f"{field.name}: {here} here, {there} there: {_MEANING[field.name]}")
        return unequal + unknown

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LayoutTag":
        """Reads :meth:`to_json`'s text.

        Raises:
          ValueError: the text is no JSON object, or holds other fields than a tag's.
        """
        try:
            facts = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"text: not JSON: {error}") from None
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(facts, dict) or set(facts) - known:
            raise ValueError(f"text: expected a JSON object with fields {sorted(known)}, got {text[:200]}")
        return cls(**facts)
