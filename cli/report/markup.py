"""HTML and SVG as text, in which every string is escaped unless it was made here."""

from html import escape

from bpc_cli.console import printable

__all__ = ["Html", "element", "join"]

VOID = {"meta"}


class Html(str):
    """Text that is HTML already. Every other string is text from somewhere, and is escaped."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An element. `class_` stands for the attribute `class`, `view_box` for `viewBox`, None for no attribute.

    Children and the values of attributes are escaped, and control characters replaced; children of type `Html` stay.
    """
    written = "".join(
        f' {_attribute(name)}="{escape(printable(value), quote=True)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{written}>" if tag in VOID else f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: object) -> Html:
    """Children one after the other."""
    return Html("".join(child if isinstance(child, Html) else escape(printable(child)) for child in children))


def _attribute(name: str) -> str:
    return "viewBox" if name == "view_box" else name.rstrip("_").replace("_", "-")
