// A browser refuses to read the pages of a site on disk, from which a search takes the lines around its hits.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";
