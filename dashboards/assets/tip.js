// Tooltip of a plot: a title and lines of label and value, beside the pointer and within the window.
// clear: areas to avoid, as pairs of top and bottom in the window: the first pair with room beside it is used.
window.overlapscope.tip = (area) => {
  const GAP_PX = 14
  const EDGE_PX = 8
  const MOST_LINES = 8 // number of lines below each other; more are in two columns
  const tip = document.getElementById("tip")
  let pointer = null

  function place({sx, sy}, clear = []) {
    const box = area.getBoundingClientRect()
    pointer = {x: box.left + sx, y: box.top + sy, clear}
    if (!tip.hidden) move()
  }

  function move() {
    const {x, y, clear} = pointer
    const isRight = x + GAP_PX + tip.offsetWidth <= window.innerWidth - EDGE_PX
    const tops = [...clear, [y, y]].flatMap(([top, bottom]) => {
      const [above, below] = [top - GAP_PX - tip.offsetHeight, bottom + GAP_PX]
      return y - top < bottom - y ? [above, below] : [below, above]
    })
    const fits = (top) => top >= EDGE_PX && top + tip.offsetHeight <= window.innerHeight - EDGE_PX
    tip.style.left = `${Math.max(4, isRight ? x + GAP_PX : x - GAP_PX - tip.offsetWidth)}px`
    tip.style.top = `${Math.max(4, tops.find(fits) ?? tops.at(-1))}px`
  }

  function fill(title, labels, values) {
    const element = (name, textContent, className = "") =>
      Object.assign(document.createElement(name), {textContent, className})
    const lines = Array.from(labels, (label, i) => [element("span", label, "label"), element("span", values[i])])
    const half = lines.length > MOST_LINES ? Math.ceil(lines.length / 2) : lines.length
    const halves = [lines.slice(0, half), lines.slice(half)].filter((each) => each.length)
    const columns = element("div", "", "columns")
    for (const each of halves) columns.appendChild(element("div", "")).append(...each.flat())
    tip.replaceChildren(element("strong", title), columns)
    tip.hidden = false
    if (pointer) move()
  }

  return {place, fill, hide: () => (tip.hidden = true)}
}
