// The search reads its index by a request, which browsers refuse to pages that were opened as files.
if (location.protocol === "file:")
  document.querySelector(".md-search__input")?.setAttribute("placeholder", "Search (from a web server only)");
