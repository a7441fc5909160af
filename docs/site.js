// For a keyboard: wide tables scroll with the arrow keys. For a screen reader: the search has a name.
document$.subscribe(() =>
  requestAnimationFrame(() => {
    document.querySelector(".md-search").setAttribute("aria-label", "Search");
    for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code"))
      if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  })
);
