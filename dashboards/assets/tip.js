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

// Tooltip with what the server knows of the thing under the pointer, asked for when that changes, one at a time.
// at: returns the columns of a request for a mouse event, null where there is nothing, undefined to leave all as it is.
window.overlapscope.askingTip = (() => {
  let requests = 0
  const isSame = (one, other) => one && other && Object.keys(one).every((name) => one[name] === other[name])

  return ({area, figure, request, response, at, clear = () => []}) => {
    const tip = window.overlapscope.tip(area)
    let under = null
    let asked = null
    let id = 0
    let waiting = false

    function ask() {
      waiting = true
      asked = under
      id = requests += 1
      request.data = Object.fromEntries(Object.entries({id, ...asked}).map(([name, value]) => [name, [value]]))
    }

    function leave() {
      under = null
      tip.hide()
    }

    function point(event) {
      const thing = at(event)
      if (thing === undefined) return
      if (!thing) return leave()
      tip.place(event, clear(event))
      if (isSame(thing, under)) return
      under = thing
      if (!waiting) ask()
    }

    function answered() {
      const {id: ids, title, label, value} = response.data
      if (ids[0] !== id) return
      waiting = false
      if (!under) return
      if (title[0]) tip.fill(title[0], label, value)
      else tip.hide()
      if (!isSame(asked, under)) ask()
    }

    window.overlapscope.on(response, "data", answered)
    figure.on_event("mousemove", point)
    area.addEventListener("mouseleave", leave)
    return {leave}
  }
})()
