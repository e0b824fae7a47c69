"""Our pages in Flower: skeletons of HTML, whose modules read the JSON API."""
