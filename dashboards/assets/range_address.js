// Keeps the range that a figure shows in the address, as from and to, unless it is the initial one of the page.
// Going back undoes a zoom, but not a pan. Call it when the figure shows its initial range, or give what returns it.
window.overlapscope.keepRange = (range, show, initial) => {
  const begun = [range.start, range.end]
  initial ??= () => begun
  const round = (value) => Number(value.toFixed(2))
  let remembering
  let remembered

  function restore() {
    const query = new URLSearchParams(location.search)
    const [from, to] = ["from", "to"].map((name) => Number(query.get(name) ?? NaN))
    if (to > from) show(from, to)
    else if (range.start !== initial()[0] || range.end !== initial()[1]) show(...initial())
    remembered = range.end - range.start
  }

  function remember() {
    const [first, last] = initial()
    const isFirst = round(range.start) === round(first) && round(range.end) === round(last)
    const [from, to] = isFirst ? [null, null] : [round(range.start), round(range.end)]
    const length = range.end - range.start
    const isNew = Math.abs(Math.log(length / remembered)) > 0.2
    window.overlapscope.setAddress({from, to}, {isNew})
    remembered = length
  }

  restore()
  for (const end of ["start", "end"]) {
    range.properties[end].change.connect(() => {
      clearTimeout(remembering)
      remembering = setTimeout(remember, 250)
    })
  }
  window.addEventListener("popstate", restore)
}
